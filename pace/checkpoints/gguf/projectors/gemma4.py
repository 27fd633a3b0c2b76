"""The towers of Gemma 4: a transformer on patches of images and a conformer on spectrograms, or, in its unified models,
two matrices.

The epsilon of norms is not in a file, nor how far sound is seen; the defaults of config.json are right for all
published models. Sizes of images are those of the published processor_config.json."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Fields
from pace.checkpoints.gguf.architectures.forms import FILTERS, Form
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.projectors.pixels import FLAT_PATCHES, ROWS_OF_PIXELS
from pace.checkpoints.gguf.projectors.projector import BLOCKS, PATCHES, Projector, Tower, TowerFile, Whole

POOLED = 3
"""Rows of patches that one row of pooled patches has, unless a file states it."""
MAX_TOKENS = 280
"""Maximum rows for the text model of an image."""
PADDING = 0
"""Id of the token whose embeddings of layers rows of an image have, unless a file states it."""
TABLE, MATRIX, SOUND_MATRIX = "v.position_embd.weight", "mm.input_projection", "mm.a.input_projection"
SOUND_BLOCKS = "a.blk"
SOUND_ROWS = "a.pre_encode.out"
"""The product after the last layer, whose name belongs to another family's first one."""
BOUND = Form(lambda shape: () if shape == (1,) else shape)
"""A number that is a vector in a file."""
POSITIVE_SCALES = "per_dim_scale_softplus"
"""The softplus of `per_dim_scale`, under a name that no checkpoint of the Hub has."""
BY_AXIS = Form(lambda shape: (*shape[1::-1], *shape[2:]), lambda values: values.transpose(0, 1))
"""Positions of rows and columns: `[2, positions, hidden]` in a file, `[positions, 2, hidden]` on the Hub."""
CLIPPED = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Matrices with bounds of their inputs and outputs."""
CLIPPED_OF_SOUND = {
    "ffn_up": "feed_forward1.ffw_layer_1",
    "ffn_down": "feed_forward1.ffw_layer_2",
    "ffn_up_1": "feed_forward2.ffw_layer_1",
    "ffn_down_1": "feed_forward2.ffw_layer_2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.post",
    "conv_pw1": "lconv1d.linear_start",
    "conv_pw2": "lconv1d.linear_end",
}
NAMES = TensorNames(
    {
        "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
        TABLE: "model.vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias": "model.vision_tower.std_bias",
        "v.std_scale": "model.vision_tower.std_scale",
        MATRIX: "model.embed_vision.embedding_projection",
    },
    "model.vision_tower.encoder.layers",
    {
        "ln1": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        **CLIPPED,
        **{f"{part}.weight": f"{name}.linear.weight" for part, name in CLIPPED.items()},
    },
    BLOCKS,
)
NAMES_OF_UNIFIED = TensorNames(
    {
        "v.patch_norm.1": "model.vision_embedder.patch_ln1",
        "v.patch_embd": "model.vision_embedder.patch_dense",
        "v.patch_norm.2": "model.vision_embedder.patch_ln2",
        "v.patch_norm.3": "model.vision_embedder.pos_norm",
        TABLE: "model.vision_embedder.pos_embedding",
        MATRIX: "model.embed_vision.embedding_projection",
    },
    "",
    {},
    BLOCKS,
)
NAMES_OF_SOUND = TensorNames(
    {
        "a.conv1d.0": "model.audio_tower.subsample_conv_projection.layer0.conv",
        "a.conv1d.0.norm": "model.audio_tower.subsample_conv_projection.layer0.norm",
        "a.conv1d.1": "model.audio_tower.subsample_conv_projection.layer1.conv",
        "a.conv1d.1.norm": "model.audio_tower.subsample_conv_projection.layer1.norm",
        "a.input_projection": "model.audio_tower.subsample_conv_projection.input_proj_linear",
        SOUND_ROWS: "model.audio_tower.output_proj",
        SOUND_MATRIX: "model.embed_audio.embedding_projection",
    },
    "model.audio_tower.layers",
    {
        "ffn_norm": "feed_forward1.pre_layer_norm",
        "ffn_post_norm": "feed_forward1.post_layer_norm",
        "ffn_norm_1": "feed_forward2.pre_layer_norm",
        "ffn_post_norm_1": "feed_forward2.post_layer_norm",
        "attn_pre_norm": "norm_pre_attn",
        "attn_post_norm": "norm_post_attn",
        "attn_k_rel": "self_attn.relative_k_proj",
        "per_dim_scale.weight": f"self_attn.{POSITIVE_SCALES}",
        "conv_norm": "lconv1d.pre_layer_norm",
        "conv_dw": "lconv1d.depthwise_conv1d",
        "norm_conv": "lconv1d.conv_norm",
        "ln2": "norm_out",
        **CLIPPED_OF_SOUND,
        **{f"{part}.weight": f"{name}.linear.weight" for part, name in CLIPPED_OF_SOUND.items()},
    },
    SOUND_BLOCKS,
)


def gemma4(file: TowerFile) -> Tower:
    heads = file.integer("attention.head_count")
    rows = {part: file.shape(f"{BLOCKS}.0.attn_{part}.weight", 2)[0] for part in "qk"}
    head_dim = rows["q"] // max(1, heads)
    bounds = _bounds(file)
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": file.integer("embedding_length"),
        "intermediate_size": file.intermediate_size,
        "num_hidden_layers": file.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": rows["k"] // max(1, head_dim),
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "patch_size": file.integer("patch_size"),
        "pooling_kernel_size": file.keys.integer("projector.scale_factor", POOLED),
        "position_embedding_size": file.shape(TABLE, 3)[1],
        "use_clipped_linears": bool(bounds),
        "standardize": file.has("v.std_bias"),
    }
    forms = {PATCHES: ROWS_OF_PIXELS, **bounds}
    return Tower(_config(file, vision), _settings(vision), file.tensors(NAMES, forms), text=_text(file))


def gemma4_unified(file: TowerFile) -> Tower:
    vision = {
        "model_type": "gemma4_unified_vision",
        "patch_size": file.integer("patch_size"),
        "pooling_kernel_size": file.keys.integer("projector.scale_factor", POOLED),
        "mm_embed_dim": file.shape(PATCHES, 2)[0],
        "mm_posemb_size": file.shape(TABLE, 3)[1],
        "output_proj_dims": file.shape(f"{MATRIX}.weight", 2)[1],
    }
    norm = dict.fromkeys(("v.patch_norm.1.weight", "v.patch_norm.1.bias"), FLAT_PATCHES)
    tensors = file.tensors(NAMES_OF_UNIFIED, {PATCHES: FLAT_PATCHES, TABLE: BY_AXIS, **norm})
    text = {"model_type": "gemma4_unified_text", **_text(file)}
    return Tower(_config(file, vision), _settings(vision), tensors, text=text)


def _text(file: TowerFile) -> Fields:
    """Fields of the text that its file lacks. In E2B and E4B, rows of an image see only earlier ones."""
    sees_all = not file.config.get("hidden_size_per_layer_input")
    padding = {} if file.config.get("pad_token_id") is not None else {"pad_token_id": PADDING}
    return padding | ({"use_bidirectional_attention": "vision"} if sees_all else {})


def _config(file: TowerFile, vision: Fields) -> Fields:
    return {"vision_config": vision, "image_token_id": file.placeholder("<|image|>")}


def _settings(vision: Fields) -> Fields:
    return {"max_soft_tokens": MAX_TOKENS, **{name: vision[name] for name in ("patch_size", "pooling_kernel_size")}}


def gemma4_sound(file: TowerFile) -> Tower:
    bands, bounds = file.integer("num_mel_bins"), _bounds(file)
    audio = {
        "model_type": "gemma4_audio",
        "hidden_size": file.integer("embedding_length"),
        "num_hidden_layers": file.integer("block_count"),
        "num_attention_heads": file.integer("attention.head_count"),
        "subsampling_conv_channels": [file.shape(f"a.conv1d.{number}.weight", 4)[0] for number in (0, 1)],
        "conv_kernel_size": file.shape(f"{SOUND_BLOCKS}.0.conv_dw.weight", 2)[1],
        "use_clipped_linears": bool(bounds),
        "output_proj_dims": file.shape(f"{SOUND_ROWS}.weight", 2)[0],
    }
    filters = {name: FILTERS for name in file.sources if name.endswith(".conv_dw.weight")}
    tensors = file.tensors(NAMES_OF_SOUND, bounds | filters)
    return Tower(_sound_config(file, audio), {"feature_size": bands}, tensors)


def gemma4_unified_sound(file: TowerFile) -> Tower:
    samples = file.shape(f"{SOUND_MATRIX}.weight", 2)[1]
    audio = {"model_type": "gemma4_unified_audio", "audio_embed_dim": samples}
    return Tower(_sound_config(file, audio), {"audio_samples_per_token": samples}, file.tensors(NAMES_OF_SOUND))


def _sound_config(file: TowerFile, audio: Fields) -> Fields:
    return {"audio_config": audio, "audio_token_id": file.placeholder("<|audio|>")}


def _bounds(file: TowerFile) -> dict[str, Form]:
    """The forms of bounds of inputs and outputs."""
    return {name: BOUND for name in file.sources if name.endswith(("put_min", "put_max"))}


WHOLE = Whole("gemma4", "Gemma4ForConditionalGeneration")
UNIFIED = Whole("gemma4_unified", "Gemma4UnifiedForConditionalGeneration")
GEMMA4 = Projector("gemma4v", {"gemma4": WHOLE}, gemma4)
GEMMA4_UNIFIED = Projector("gemma4uv", {"gemma4": UNIFIED}, gemma4_unified)
GEMMA4_SOUND = Projector("gemma4a", {}, gemma4_sound)
GEMMA4_UNIFIED_SOUND = Projector("gemma4ua", {}, gemma4_unified_sound)
