"""mmproj files of llama.cpp: the towers of a model, whose text part is another GGUF file. `read_towers` converts one.

A file does not say what llama.cpp derives from its projector type: the activation, the windows of attention, and the
sizes of images. Sizes that llama.cpp takes from tensors are taken from them here, too. The epsilon of norms is ignored:
the converter writes that of the text model.

Names and keys: conversion/qwenvl.py, conversion/qwen3vl.py and tools/mtmd/clip.cpp of llama.cpp. Sizes of images: the
published preprocessor_config.json of each family."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pace.checkpoints.gguf.architectures.architecture import Fields
from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.config import shortest
from pace.checkpoints.gguf.file import GgufFile, Metadata
from pace.checkpoints.gguf.tokens import read_tokens

ARCHITECTURE = "clip"
"""general.architecture of these files."""
QWEN2, QWEN2_5, QWEN3, QWEN3_AUDIO = "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "qwen3a"
PROJECTORS = (QWEN2, QWEN2_5, QWEN3, QWEN3_AUDIO)
MODEL_TYPES = {
    ("qwen2vl", QWEN2, None): "qwen2_vl",
    ("qwen2vl", QWEN2_5, None): "qwen2_5_vl",
    ("qwen3vl", QWEN3, None): "qwen3_vl",
    ("qwen3vlmoe", QWEN3, None): "qwen3_vl_moe",
    ("qwen3vl", None, QWEN3_AUDIO): "qwen3_asr",
    ("qwen3vlmoe", QWEN3, QWEN3_AUDIO): "qwen3_omni_moe",
}
"""Architecture of the text, and projector types of images and sound -> the Hub's model_type of the whole."""
TEXT_ARCHITECTURES = frozenset(text for text, _, _ in MODEL_TYPES)
PIXELS = {"qwen3_vl": (1 << 16, 1 << 24), "qwen3_vl_moe": (1 << 16, 1 << 24)}
OTHER_PIXELS = 56 * 56, 128 * 128 * 28 * 28
"""Minimum and maximum pixels of an image, by model_type, in the published checkpoints."""
STATISTICS = (0.48145466, 0.4578275, 0.40821073, 0.26862954, 0.26130258, 0.27577711)
"""Means and deviations of Qwen2-VL and Qwen2.5-VL. A file has them in fp32, from which no rule gives them back."""
WINDOW = 112
"""Side in pixels of Qwen2.5-VL's windows."""
PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""Weights of the two frames of a patch, `[hidden, channels, rows, columns]` each."""
COMPUTED = "a.position_embd.weight"
"""A table that is computed here."""

BLOCK = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
}
MERGER = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}
MERGER_OF_QWEN3 = {
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
}
MLP = {
    QWEN2: {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    QWEN2_5: {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    QWEN3: {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
}
AUDIO = TensorNames(
    {
        **{f"a.conv2d.{number}": f"audio_tower.conv2d{number}" for number in (1, 2, 3)},
        "a.conv_out": "audio_tower.conv_out",
        "a.post_ln": "audio_tower.ln_post",
        **{f"mm.a.mlp.{number}": f"audio_tower.proj{number}" for number in (1, 2)},
    },
    "audio_tower.layers",
    {
        "ln1": "self_attn_layer_norm",
        "ln2": "final_layer_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ffn_up": "fc1",
        "ffn_down": "fc2",
    },
    "a.blk",
)
ASR_PROJECTOR = {f"audio_tower.proj{number}.": f"audio_tower.projector.linear_{number}." for number in (1, 2)}


@dataclass
class Towers:
    """What a file adds to the checkpoint of its text."""

    path: Path | None = None
    """The mmproj file; None for no towers."""
    config: Fields = field(default_factory=dict)
    """Fields of config.json."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section of processor_config.json -> settings of a processor."""
    names: dict[str, str] = field(default_factory=dict)
    """The Hub's name of a tensor -> its name in the file. The two halves of PATCHES are one tensor."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The Hub's shapes of tensors that have others in the file."""


def read_towers(file: GgufFile, text: Metadata, config: Fields) -> Towers:
    """Converts an open mmproj file for a text model, with the metadata of its GGUF file and its `config`.

    Raises ValueError for a file that is no mmproj file or that belongs to another model, and for damaged contents.
    Raises NotImplementedError for an unknown projector type."""
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"{file.path} is a model of the architecture {architecture!r}, and no mmproj file, whose architecture is "
            f"{ARCHITECTURE!r}"
        )
    vision, audio = (_projector(metadata, kind) for kind in ("vision", "audio"))
    model_type = MODEL_TYPES.get((text.text("general.architecture"), vision, audio))
    if model_type is None:
        found = " and ".join(kind for kind in (vision, audio) if kind) or "no tower"
        raise ValueError(
            f"{file.path} has {found}, and does not belong to {text.path}, whose architecture is "
            f"{text['general.architecture']!r}"
        )
    towers = Towers(file.path, {"model_type": model_type})
    for kind in ("vision", "audio"):
        _check_width(Metadata(file.path, metadata, f"clip.{kind}."), text.path, config["hidden_size"])
    if vision:
        towers.config["image_token_id"] = _placeholder(text, "<|image_pad|>")
        _add_sections(towers, text, config)
        _add_vision(towers, file, vision, model_type)
    _check_deepstack(towers, text)
    if audio:
        towers.config["audio_token_id"] = _placeholder(text, "<|audio_pad|>")
        _add_audio(towers, file, model_type)
    # Tensors without a place are refused by the check that the model uses all.
    rest = file.tensors.keys() - {*towers.names.values(), PATCHES[1], COMPUTED}
    towers.names |= {name: name for name in rest}
    return towers


def _projector(metadata: Metadata, kind: str) -> str | None:
    """Returns the projector type of the tower for images or sound; None if the file has no such tower."""
    if not metadata.flag(f"clip.has_{kind}_encoder", False):
        return None
    names = ("clip.projector_type", f"clip.{kind}.projector_type")
    found = next((name for name in map(metadata.text, names) if name), None)
    if found is None:
        raise ValueError(f"{metadata.path} has no {names[0]} in its metadata")
    if found not in PROJECTORS:
        raise NotImplementedError(
            f"{metadata.path}: the projector type {found[:80]!r} is not implemented; implemented: "
            f"{', '.join(PROJECTORS)}"
        )
    return found


def _check_width(keys: Metadata, text: Path, hidden_size: int) -> None:
    """Raises ValueError if a tower makes rows of another width than the text model's."""
    width = keys.integer("projection_dim", hidden_size)
    if width != hidden_size:
        raise ValueError(
            f"{keys.path} belongs to another model: its rows have {width} numbers ({keys.prefix}projection_dim), and "
            f"those of {text} {hidden_size}"
        )


def _check_deepstack(towers: Towers, text: Metadata) -> None:
    """Raises ValueError if a text model of Qwen3-VL or Qwen3-ASR expects outputs of another number of blocks. Files of
    mixtures state no such number, or 0."""
    stated = text.integer("qwen3vl.n_deepstack_layers")
    found = len(towers.config.get("vision_config", {}).get("deepstack_visual_indexes", ()))
    if stated not in (None, found):
        raise ValueError(
            f"{towers.path} does not belong to {text.path}: it has {found} layers of deepstack, and the model {stated}"
        )


def _placeholder(text: Metadata, token: str) -> int:
    """Returns the id of a placeholder in the text's vocabulary."""
    tokens = read_tokens(text)
    if tokens is None or token not in tokens.ids:
        raise ValueError(f"{text.path} has no token {token} in its vocabulary, which stands for a row of a tower")
    return tokens.ids[token]


def _add_sections(towers: Towers, text: Metadata, config: Fields) -> None:
    """Adds how the frequencies of a head are split among time, height and width. A file without it has the default."""
    sections = text.numbers(f"{text['general.architecture']}.rope.dimension_sections")
    if sections is not None:
        rope = config.get("rope_scaling") or {"rope_type": "default"}
        towers.config["rope_scaling"] = {**rope, "mrope_section": sections[:3].tolist()}


def _shape(file: GgufFile, name: str, dimensions: int) -> tuple[int, ...]:
    """Returns the shape of a tensor that must be there."""
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != dimensions:
        raise ValueError(f"{file.path} has no tensor {name} of {dimensions} dimensions")
    return tensor.shape


def _integer(keys: Metadata, name: str) -> int:
    return keys.required(name, keys.integer(name))


def _add_vision(towers: Towers, file: GgufFile, projector: str, model_type: str) -> None:
    keys = Metadata(file.path, file.metadata, "clip.vision.")
    hidden, depth = _integer(keys, "embedding_length"), _integer(keys, "block_count")
    patch = _shape(file, PATCHES[0], 4)
    if _shape(file, PATCHES[1], 4) != patch:
        raise ValueError(f"{file.path}: {' and '.join(PATCHES)} differ in shape")
    up, down = (_shape(file, f"v.blk.0.{part}.weight", 2) for part in ("ffn_up", "ffn_down"))
    mlp = MLP[projector]
    if projector != QWEN3 and up[1] != hidden == down[1]:  # the first converters exchanged them
        up, mlp = down, {**mlp, "ffn_up": mlp["ffn_down"], "ffn_down": mlp["ffn_up"]}
    fields: Fields = {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": up[0],
        "num_heads": _integer(keys, "attention.head_count"),
        "in_channels": patch[1],
        "patch_size": _integer(keys, "patch_size"),
        "temporal_patch_size": len(PATCHES),
        "spatial_merge_size": keys.integer("spatial_merge_size", 2),
        "out_hidden_size": _integer(keys, "projection_dim"),
        "splits_qkv": "v.blk.0.attn_q.weight" in file.tensors,
    }
    outer = {"v.patch_embd": "visual.patch_embed.proj", **(MERGER_OF_QWEN3 if projector == QWEN3 else MERGER)}
    if projector == QWEN2:  # its config.json has other names
        fields |= {"embed_dim": hidden, "hidden_size": fields["out_hidden_size"], "mlp_ratio": (up[0] + 0.5) / hidden}
    if projector == QWEN2_5:
        every = _integer(keys, "n_wa_pattern")
        fields["fullatt_block_indexes"] = list(range(max(0, every - 1), depth, max(1, every)))
        fields["window_size"] = keys.integer("window_size", WINDOW)
    if projector == QWEN3:
        fields["num_position_embeddings"] = _shape(file, "v.position_embd.weight", 2)[0]
        found = (re.match(r"v\.deepstack\.(\d+)\.", name) for name in file.tensors)
        fields["deepstack_visual_indexes"] = layers = sorted({int(layer[1]) for layer in found if layer})
        outer["v.position_embd"] = "visual.pos_embed"
        parts = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
        outer |= {
            f"v.deepstack.{layer}.{part}": f"visual.deepstack_merger_list.{index}.{name}"
            for index, layer in enumerate(layers)
            for part, name in parts.items()
        }
    names = TensorNames(outer, "visual.blocks", {**BLOCK, **mlp}, "v.blk")
    sources = [name for name in file.tensors if not name.startswith(("a.", "mm.a.")) and name != PATCHES[1]]
    towers.names |= {names.on_hub(name): name for name in sources}
    towers.shapes[names.on_hub(PATCHES[0])] = (*patch[:2], len(PATCHES), *patch[2:])
    towers.config["vision_config"] = fields
    pixels = PIXELS.get(model_type, OTHER_PIXELS)
    mean, std = (keys.required(f"image_{name}", keys.numbers(f"image_{name}")) for name in ("mean", "std"))
    towers.settings["image_processor"] = {
        "patch_size": fields["patch_size"],
        "temporal_patch_size": fields["temporal_patch_size"],
        "merge_size": fields["spatial_merge_size"],
        "image_mean": [_statistic(float(value)) for value in mean],
        "image_std": [_statistic(float(value)) for value in std],
        "min_pixels": keys.integer("image_min_pixels", pixels[0]),
        "max_pixels": keys.integer("image_max_pixels", pixels[1]),
    }


def _statistic(value: float) -> float:
    """The number in preprocessor_config.json that an fp32 value stands for."""
    return next((known for known in STATISTICS if np.float32(known) == value), shortest(value))


def _add_audio(towers: Towers, file: GgufFile, model_type: str) -> None:
    keys = Metadata(file.path, file.metadata, "clip.audio.")
    bands = _integer(keys, "num_mel_bins")
    towers.config["audio_config"] = {
        "num_mel_bins": bands,
        "encoder_layers": _integer(keys, "block_count"),
        "encoder_attention_heads": _integer(keys, "attention.head_count"),
        "encoder_ffn_dim": _integer(keys, "feed_forward_length"),
        "d_model": _integer(keys, "embedding_length"),
        "downsample_hidden_size": _shape(file, "a.conv2d.1.weight", 4)[0],
        "output_dim": _integer(keys, "projection_dim"),
    }
    towers.settings["feature_extractor"] = {"feature_size": bands}
    for source, tensor in file.tensors.items():
        if source.startswith(("a.", "mm.a.")) and source != COMPUTED:
            name = AUDIO.on_hub(source)
            if model_type == "qwen3_asr":
                stem = next((stem for stem in ASR_PROJECTOR if name.startswith(stem)), "")
                name = ASR_PROJECTOR.get(stem, "") + name.removeprefix(stem)
            towers.names[name] = source
            if name.endswith(".bias"):  # [channels, 1, 1] for a convolution
                towers.shapes[name] = (prod(tensor.shape),)
