"""Towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 for images.

The epsilon of norms is ignored: the converter writes that of the text model. Sizes of images are not in a file; they
are those of each family's published preprocessor_config.json."""

from __future__ import annotations

import re

from pace.checkpoints.gguf.architectures.architecture import Fields
from pace.checkpoints.gguf.architectures.forms import Form
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.projectors.projector import (
    BLOCKS,
    PATCHES,
    Projector,
    Tower,
    TowerFile,
    TowerTensor,
    Whole,
    with_sections,
)

FRAMES = (PATCHES, f"{PATCHES}.1")
"""Weights of the two frames of a patch, `[hidden, channels, rows, columns]` each."""
JOINED = Form(lambda shape: (*shape[:2], len(FRAMES), *shape[2:]), lambda frames: frames.movedim(0, 2))
"""Frames as a dimension after the channels."""
WINDOW = 112
"""Side in pixels of Qwen2.5-VL's windows."""
PIXELS = 56 * 56, 128 * 128 * 28 * 28
PIXELS_OF_QWEN3 = 1 << 16, 1 << 24
"""Minimum and maximum pixels of an image."""

BLOCK = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
}
PLAIN_MLP = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
MLP_OF_QWEN3 = {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
MERGER = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}
MERGER_OF_QWEN3 = {
    "v.position_embd": "visual.pos_embed",
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
}


def qwen2(file: TowerFile) -> Tower:
    hidden, out = file.integer("embedding_length"), file.integer("projection_dim")
    own = {"embed_dim": hidden, "hidden_size": out, "mlp_ratio": (file.intermediate_size + 0.5) / hidden}
    return _tower(file, own, PLAIN_MLP, MERGER, PIXELS)


def qwen2_5(file: TowerFile) -> Tower:
    every, depth = file.integer("n_wa_pattern"), file.integer("block_count")
    own = {
        "fullatt_block_indexes": list(range(max(0, every - 1), depth, max(1, every))),
        "window_size": file.keys.integer("window_size", WINDOW),
    }
    return _tower(file, own, GATED_MLP, MERGER, PIXELS)


def qwen3(file: TowerFile) -> Tower:
    found = (re.match(r"v\.deepstack\.(\d+)\.", name) for name in file.sources)
    layers = sorted({int(layer[1]) for layer in found if layer})
    own = {
        "num_position_embeddings": file.shape("v.position_embd.weight", 2)[0],
        "deepstack_visual_indexes": layers,
    }
    deepstack = {
        f"v.deepstack.{layer}.{part}": f"visual.deepstack_merger_list.{index}.{name}"
        for index, layer in enumerate(layers)
        for part, name in {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}.items()
    }
    is_omni = file.file.metadata.flag("clip.has_audio_encoder", False)
    return _tower(file, own, MLP_OF_QWEN3, MERGER_OF_QWEN3 | deepstack, PIXELS if is_omni else PIXELS_OF_QWEN3)


def _tower(file: TowerFile, own: Fields, mlp: dict[str, str], merger: dict[str, str], pixels: tuple[int, int]) -> Tower:
    """What the families have in common. `own`: fields of `vision_config` of one family."""
    patch = file.shape(PATCHES, 4)
    if file.shape(FRAMES[1], 4) != patch:
        raise ValueError(f"{file.path}: {' and '.join(FRAMES)} differ in shape")
    vision = {
        "depth": file.integer("block_count"),
        "hidden_size": file.integer("embedding_length"),
        "intermediate_size": file.intermediate_size,
        "num_heads": file.integer("attention.head_count"),
        "in_channels": patch[1],
        "patch_size": file.integer("patch_size"),
        "temporal_patch_size": len(FRAMES),
        "spatial_merge_size": file.keys.integer("spatial_merge_size", 2),
        "out_hidden_size": file.integer("projection_dim"),
        "splits_qkv": file.has("v.blk.0.attn_q.weight"),
        **own,
    }
    settings = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        **file.normalisation(),
        "min_pixels": file.keys.integer("image_min_pixels", pixels[0]),
        "max_pixels": file.keys.integer("image_max_pixels", pixels[1]),
    }
    outer = {"v.patch_embd": "visual.patch_embed.proj", **merger}
    names = TensorNames(outer, "visual.blocks", {**BLOCK, **mlp}, BLOCKS)
    config = {"vision_config": vision, "image_token_id": file.placeholder("<|image_pad|>")}
    tensors = file.tensors(names) | {names.on_hub(PATCHES): TowerTensor(FRAMES, JOINED)}
    del tensors[FRAMES[1]]
    return Tower(config, settings, tensors, text=with_sections(file.text, file.config))


QWEN2 = Projector("qwen2vl_merger", {"qwen2vl": Whole("qwen2_vl", "Qwen2VLForConditionalGeneration")}, qwen2)
QWEN2_5 = Projector("qwen2.5vl_merger", {"qwen2vl": Whole("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")}, qwen2_5)
QWEN3 = Projector(
    "qwen3vl_merger",
    {
        "qwen3vl": Whole("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        "qwen3vlmoe": Whole("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        "qwen35": Whole("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        "qwen35moe": Whole("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    },
    qwen3,
)
