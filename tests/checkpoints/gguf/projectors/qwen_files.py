"""Pairs of a GGUF file and an mmproj file of tiny checkpoints, like those of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints.gguf.files import finish, write_gguf
from tests.checkpoints.gguf.hybrids.hybrid_files import write_hybrid
from tests.checkpoints.gguf.projectors.checkpoints import save_text
from tests.checkpoints.gguf.projectors.files import add_fitting, add_vocabulary
from tests.editing import edit_tensors
from tests.llm.models.towers import hearing, omni, seeing

PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger", "qwen3_5": "qwen3vl_merger", "qwen3_5_moe": "qwen3vl_merger",
}  # fmt: skip
"""Projector types by model_type."""
TEXT: dict[str, Any] = {"max_position_embeddings": 2048}
EXPERTS: dict[str, Any] = {"mlp_only_layers": []}
"""All layers of GGUF files have experts."""
CHANGED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"window_size": 112, "patch_size": 14},
}
"""Fields of `vision_config` that a file does not state, as in the published checkpoints."""
MARKS = {
    90: "<|image_pad|>", 92: "<|vision_start|>", 93: "<|vision_end|>", 94: "<|audio_start|>", 95: "<|audio_end|>",
    96: "<|audio_pad|>",
}  # fmt: skip
"""Special tokens of the vocabulary by id."""
MARKS_OF_ASR = {90: "<|audio_pad|>", 91: "<|audio_start|>", 92: "<|audio_end|>"}
NAMES = {
    r"visual\.patch_embed\.proj": "v.patch_embd",
    r"visual\.pos_embed": "v.position_embd",
    r"visual\.blocks\.(\d+)\.norm([12])": r"v.blk.\1.ln\2",
    r"visual\.blocks\.(\d+)\.attn\.proj": r"v.blk.\1.attn_out",
    r"visual\.blocks\.(\d+)\.attn\.(qkv|q|k|v)": r"v.blk.\1.attn_\2",
    r"visual\.blocks\.(\d+)\.mlp\.(?:linear_fc1|fc1|up_proj)": r"v.blk.\1.ffn_up",
    r"visual\.blocks\.(\d+)\.mlp\.(?:linear_fc2|fc2|down_proj)": r"v.blk.\1.ffn_down",
    r"visual\.blocks\.(\d+)\.mlp\.gate_proj": r"v.blk.\1.ffn_gate",
    r"visual\.merger\.(?:ln_q|norm)": "v.post_ln",
    r"visual\.merger\.(?:mlp\.0|linear_fc1)": "mm.0",
    r"visual\.merger\.(?:mlp\.2|linear_fc2)": "mm.2",
    r"visual\.deepstack_merger_list\.(\d+)\.norm": r"v.deepstack.\1.norm",
    r"visual\.deepstack_merger_list\.(\d+)\.linear_fc([12])": r"v.deepstack.\1.fc\2",
    r"audio_tower\.conv2d(\d)": r"a.conv2d.\1",
    r"audio_tower\.conv_out": "a.conv_out",
    r"audio_tower\.ln_post": "a.post_ln",
    r"audio_tower\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"a.blk.\1.attn_\2",
    r"audio_tower\.layers\.(\d+)\.self_attn\.out_proj": r"a.blk.\1.attn_out",
    r"audio_tower\.layers\.(\d+)\.self_attn_layer_norm": r"a.blk.\1.ln1",
    r"audio_tower\.layers\.(\d+)\.final_layer_norm": r"a.blk.\1.ln2",
    r"audio_tower\.layers\.(\d+)\.fc1": r"a.blk.\1.ffn_up",
    r"audio_tower\.layers\.(\d+)\.fc2": r"a.blk.\1.ffn_down",
    r"(?:audio_tower\.proj|multi_modal_projector\.linear_)([12])": r"mm.a.mlp.\1",
}
"""Pattern of a module's name in a checkpoint, from the tower on -> its name in the file."""

Change = Callable[[gguf.GGUFWriter], object]


def save_pair(folder: Path, model_type: str, types: str = "F32", add: Change = lambda writer: None) -> tuple[Path, ...]:
    """Saves a tiny checkpoint. Returns it, its GGUF file in float32, and its mmproj file with matrices of `types`.
    `add` may change the mmproj file."""
    hub, model, mmproj = (folder / name for name in ("hub", "model.gguf", "mmproj-model.gguf"))
    if model_type == "qwen3_asr":
        hearing.save_hearing(hub, {"n_window_infer": 800})
    elif model_type == "qwen3_omni_moe":
        omni.save_omni(hub, EXPERTS)
    else:
        more = EXPERTS if model_type == "qwen3_vl_moe" else {}
        seeing.save_seeing(hub, model_type, TEXT | more, CHANGED.get(model_type))
    round_convolutions(hub)
    marks = MARKS_OF_ASR if model_type == "qwen3_asr" else MARKS
    is_hybrid = model_type.startswith("qwen3_5")
    if is_hybrid:
        save_text(hub, folder / "text")
    write, text = (write_hybrid, folder / "text") if is_hybrid else (write_gguf, hub)
    write(text, model, add=lambda writer: (add_vocabulary(writer, marks), add_deepstack(writer, model_type)))
    write_mmproj(hub, mmproj, types, add)
    return hub, model, mmproj


def round_convolutions(hub: Path) -> None:
    """Rounds the convolutions of a checkpoint to float16, which mmproj files of every type have."""
    with edit_tensors(hub) as state:
        for name in state:
            if re.search(r"conv2d\d\.weight", name):
                state[name] = state[name].half().float()


def add_deepstack(writer: gguf.GGUFWriter, model_type: str) -> None:
    if model_type in ("qwen3_vl", "qwen3_asr"):
        layers = seeing.MODELS["qwen3_vl"][1]["deepstack_visual_indexes"]
        writer.add_uint32("qwen3vl.n_deepstack_layers", len(layers) if model_type == "qwen3_vl" else 0)


def write_mmproj(hub: Path, path: Path, types: str = "F32", add: Change = lambda writer: None) -> None:
    """Writes the towers of a checkpoint. `add` may change the file."""
    config = json.loads((hub / "config.json").read_text())
    config = config.get("thinker_config", config)
    vision, audio = config.get("vision_config"), config.get("audio_config")
    model_type = config["model_type"].replace("_thinker", "")
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    if vision:
        add_vision(writer, vision, model_type)
        writer.add_clip_projector_type(PROJECTORS[model_type]) if not audio else None
    if audio:
        add_audio(writer, audio)
        writer.add_string("clip.audio.projector_type", "qwen3a")
        writer.add_string("clip.vision.projector_type", "qwen3vl_merger") if vision else None
    for name, tensor in tower_tensors(load_file(hub / "model.safetensors"), vision or {}).items():
        is_matrix = tensor.ndim == 2 and not name.startswith("v.position_embd")
        other = "F16" if "conv2d" in name and name.endswith("weight") else "F32"
        add_fitting(writer, name, tensor, types if is_matrix else other)
    add(writer)
    finish(writer)


def tower_tensors(state: dict[str, Tensor], vision: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of an mmproj file, by name."""
    found: dict[str, Tensor] = {}
    for whole, tensor in state.items():
        start = re.search(r"visual\.|audio_tower\.|multi_modal_projector\.", whole)
        if not start:
            continue
        name, _, suffix = whole[start.start() :].rpartition(".")
        name = name.replace("visual.merger_list.", "visual.deepstack_merger_list.")
        name = re.sub(r"(_list\.\d+)\.ln_q", r"\1.norm", name)
        name = re.sub(r"(_list\.\d+)\.mlp\.([02])", lambda part: f"{part[1]}.linear_fc{int(part[2]) // 2 + 1}", name)
        splits = name.endswith("attn.qkv") and "num_position_embeddings" not in vision
        for part, piece in zip(("q", "k", "v") if splits else ("",), tensor.chunk(3) if splits else (tensor,)):
            pattern, here = next((p, h) for p, h in NAMES.items() if re.fullmatch(p, name))
            there = re.sub(pattern, here, name)
            if layer := re.match(r"v\.deepstack\.(\d+)", there):
                index = vision["deepstack_visual_indexes"][int(layer[1])]
                there = there.replace(layer[0], f"v.deepstack.{index}")
            there = f"{there[: -len('qkv')]}{part}" if splits else there
            if there == "v.patch_embd" and suffix == "weight":
                found |= {"v.patch_embd.weight": piece[:, :, 0], "v.patch_embd.weight.1": piece[:, :, 1]}
            else:
                is_bias = there.startswith("a.conv2d") and suffix == "bias"
                found[f"{there}.{suffix}"] = piece[:, None, None] if is_bias else piece
    return found


def add_vision(writer: gguf.GGUFWriter, vision: dict[str, Any], model_type: str) -> None:
    writer.add_bool("clip.has_vision_encoder", True)
    for key, value in {
        "projection_dim": vision["hidden_size"] if "embed_dim" in vision else vision["out_hidden_size"],
        "image_size": 560,
        "patch_size": vision["patch_size"],
        "embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "feed_forward_length": vision.get("intermediate_size", vision["hidden_size"]),  # wrong for Qwen2-VL
        "block_count": vision["depth"],
        "attention.head_count": vision["num_heads"],
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    is_qwen3 = "num_position_embeddings" in vision
    mean, std = (0.5, 0.5) if is_qwen3 else (0.48145466, 0.26862954)
    writer.add_array("clip.vision.image_mean", [mean, 0.4578275, 0.40821073])
    writer.add_array("clip.vision.image_std", [std, 0.26130258, 0.27577711])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)  # that of the text
    if is_qwen3:
        writer.add_bool("clip.use_gelu", True)
        writer.add_uint32("clip.vision.spatial_merge_size", vision["spatial_merge_size"])
        flags = [layer in vision.get("deepstack_visual_indexes", ()) for layer in range(vision["depth"])]
        writer.add_array("clip.vision.is_deepstack_layers", flags)
    if model_type == "qwen2_5_vl":
        writer.add_bool("clip.use_silu", True)
        writer.add_uint32("clip.vision.n_wa_pattern", vision["fullatt_block_indexes"][0] + 1)


def add_audio(writer: gguf.GGUFWriter, audio: dict[str, Any]) -> None:
    writer.add_bool("clip.has_audio_encoder", True)
    for key, value in {
        "projection_dim": audio["output_dim"],
        "embedding_length": audio["d_model"],
        "feed_forward_length": audio["encoder_ffn_dim"],
        "block_count": audio["encoder_layers"],
        "attention.head_count": audio["encoder_attention_heads"],
        "num_mel_bins": audio["num_mel_bins"],
    }.items():
        writer.add_uint32(f"clip.audio.{key}", value)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    writer.add_tensor("a.position_embd.weight", torch.zeros(30, audio["d_model"]).numpy())
