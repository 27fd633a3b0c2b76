"""The towers of Gemma 4: a transformer on patches of images, or, in its unified models, a matrix. Towers for sound are
left out.

The epsilon of norms is not in a file; 1e-6 is the default of config.json. Sizes of images are those of the published
processor_config.json."""

from __future__ import annotations

import logging

from pace.checkpoints.gguf.architectures.architecture import Fields
from pace.checkpoints.gguf.architectures.forms import Form
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.projectors.pixels import FLAT_PATCHES, ROWS_OF_PIXELS
from pace.checkpoints.gguf.projectors.projector import BLOCKS, PATCHES, Projector, Tower, TowerFile, Whole

logger = logging.getLogger("pace")

POOLED = 3
"""Rows of patches that one row of pooled patches has, unless a file states it."""
MAX_TOKENS = 280
"""Maximum rows for the text model of an image."""
PADDING = 0
"""Id of the token whose embeddings of layers rows of an image have, unless a file states it."""
TABLE, MATRIX = "v.position_embd.weight", "mm.input_projection"
BOUND = Form(lambda shape: () if shape == (1,) else shape)
"""A number that is a vector in a file."""
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


def gemma4(file: TowerFile) -> Tower:
    heads = file.integer("attention.head_count")
    rows = {part: file.shape(f"{BLOCKS}.0.attn_{part}.weight", 2)[0] for part in "qk"}
    head_dim = rows["q"] // max(1, heads)
    bounds = [name for name in file.sources if name.endswith(("put_min", "put_max"))]
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
    forms = {PATCHES: ROWS_OF_PIXELS, **dict.fromkeys(bounds, BOUND)}
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


def without_sound(file: TowerFile) -> Tower:
    """Leaves out a tower for sound."""
    logger.warning("%s: the tower for sound is not implemented for Gemma 4, and left out", file.path)
    return Tower({}, {}, {}, unused=tuple(file.sources))


WHOLE = Whole("gemma4", "Gemma4ForConditionalGeneration")
UNIFIED = Whole("gemma4_unified", "Gemma4UnifiedForConditionalGeneration")
GEMMA4 = Projector("gemma4v", {"gemma4": WHOLE}, gemma4)
GEMMA4_UNIFIED = Projector("gemma4uv", {"gemma4": UNIFIED}, gemma4_unified)
GEMMA4_SOUND, GEMMA4_UNIFIED_SOUND = (Projector(name, {}, without_sound) for name in ("gemma4a", "gemma4ua"))
