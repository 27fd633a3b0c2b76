"""The tower of InternVL: a vision transformer with a class token, whose rows are shuffled into wider ones and
projected."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.forms import Form
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.projectors.projector import BLOCKS, Projector, Tower, TowerFile, Whole

MIN_TILES, MAX_TILES = 1, 12
"""Tiles of an image, unless a file states them."""
NAMES = TensorNames(
    {
        "v.class_embd": "vision_tower.embeddings.cls_token",
        "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
        "v.position_embd": "vision_tower.embeddings.position_embeddings",
        "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    },
    "vision_tower.encoder.layer",
    {
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "ls1.weight": "lambda_1",
        "ls2.weight": "lambda_2",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_q_norm": "attention.q_norm",
        "attn_k_norm": "attention.k_norm",
        "attn_out": "attention.projection_layer",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    BLOCKS,
)
OF_ONE = Form(lambda shape: (1,) * (3 - len(shape)) + shape)
"""Rows of a batch of one."""


def internvl(file: TowerFile) -> Tower:
    side, patch = file.integer("image_size"), file.integer("patch_size")
    scale = max(1, file.keys.integer("projector.scale_factor", 2))
    vision = {
        "model_type": "internvl_vision",
        **file.transformer(),
        "image_size": [side, side],
        "patch_size": [patch, patch],
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "hidden_act": file.activation("gelu"),
        "norm_type": "layer_norm" if file.has("v.blk.0.ln1.bias") else "rms_norm",
        "attention_bias": file.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": file.has("v.blk.0.attn_q_norm.weight"),
    }
    num_tokens = (side // max(1, patch) // scale) ** 2
    config = {
        "vision_config": vision,
        "downsample_ratio": 1 / scale,
        "image_seq_length": num_tokens,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_id": file.placeholder("<IMG_CONTEXT>"),
    }
    settings = {
        "size": {"height": side, "width": side},
        "crop_to_patches": True,
        "min_patches": file.keys.integer("preproc_min_tiles", MIN_TILES),
        "max_patches": file.keys.integer("preproc_max_tiles", MAX_TILES),
        **file.normalisation(),
    }
    forms = {"v.class_embd": OF_ONE, "v.position_embd.weight": OF_ONE, "v.position_embd": OF_ONE}
    return Tower(config, settings, file.tensors(NAMES, forms))


TEXTS = ("qwen2", "qwen3", "qwen3moe", "llama")
INTERNVL = Projector("internvl", dict.fromkeys(TEXTS, Whole("internvl", "InternVLForConditionalGeneration")), internvl)
