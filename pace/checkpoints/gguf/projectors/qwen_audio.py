"""Towers of Qwen3-ASR and Qwen3-Omni for sound."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.forms import VECTOR
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.projectors.projector import Projector, Tower, TowerFile, Whole

TABLE = "a.position_embd.weight"
"""A table that is computed here."""
OUTER = {
    **{f"a.conv2d.{number}": f"audio_tower.conv2d{number}" for number in (1, 2, 3)},
    "a.conv_out": "audio_tower.conv_out",
    "a.post_ln": "audio_tower.ln_post",
}
BLOCK = {
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}
PROJECTOR = {
    False: {f"mm.a.mlp.{number}": f"audio_tower.projector.linear_{number}" for number in (1, 2)},
    True: {f"mm.a.mlp.{number}": f"audio_tower.proj{number}" for number in (1, 2)},
}
"""Names in Qwen3-ASR, and in Qwen3-Omni."""


def qwen3_audio(file: TowerFile) -> Tower:
    bands = file.integer("num_mel_bins")
    audio = {
        "num_mel_bins": bands,
        "encoder_layers": file.integer("block_count"),
        "encoder_attention_heads": file.integer("attention.head_count"),
        "encoder_ffn_dim": file.integer("feed_forward_length"),
        "d_model": file.integer("embedding_length"),
        "downsample_hidden_size": file.shape("a.conv2d.1.weight", 4)[0],
        "output_dim": file.integer("projection_dim"),
    }
    is_omni = file.file.metadata.flag("clip.has_vision_encoder", False)
    names = TensorNames({**OUTER, **PROJECTOR[is_omni]}, "audio_tower.layers", BLOCK, "a.blk")
    biases = {name: VECTOR for name in file.sources if name.endswith(".bias")}  # [channels, 1, 1] for a convolution
    config = {"audio_config": audio, "audio_token_id": file.placeholder("<|audio_pad|>")}
    return Tower(config, {"feature_size": bands}, file.tensors(names, biases), unused=(TABLE,))


QWEN3_AUDIO = Projector("qwen3a", {"qwen3vl": Whole("qwen3_asr", "Qwen3ASRForConditionalGeneration")}, qwen3_audio)
QWEN3_OMNI = Whole("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration")
