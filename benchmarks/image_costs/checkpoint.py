"""Shapes of Qwen3-VL as checkpoints with random weights, as GGUF files for llama.cpp, and random images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.comparison.checkpoint import random_tensor
from benchmarks.comparison.convert import convert
from pace.assets import TINY
from pace.llm.models.model_list import read_config
from pace.ops import reference

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
_TEXT = dict(hidden_act="silu", rms_norm_eps=1e-6, head_dim=128, rope_theta=5e6, max_position_embeddings=262144,
             rope_scaling=dict(rope_type="default", mrope_interleaved=True, mrope_section=[24, 20, 20]))  # fmt: skip
_VISION = dict(hidden_act="gelu_pytorch_tanh", patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
               in_channels=3, num_position_embeddings=2304, num_heads=16)  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-2b": (
        dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8),
        dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17]),
    ),
    "tiny": (
        dict(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2),
        dict(depth=6, hidden_size=128, intermediate_size=256, num_heads=2, deepstack_visual_indexes=[1, 2, 3]),
    ),
}  # fmt: skip
"""Fields of `text_config` and `vision_config`. Embedding and head are one matrix."""


def shape_config(shape: str) -> dict[str, Any]:
    """The config.json of a shape. Placeholders are the last ids of the vocabulary."""
    text, vision = SHAPES[shape]
    names = dict(zip(SPECIAL, range(text["vocab_size"] - len(SPECIAL), text["vocab_size"])))
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None,
        "image_token_id": names["<|image_pad|>"], "video_token_id": names["<|video_pad|>"],
        "vision_start_token_id": names["<|vision_start|>"], "vision_end_token_id": names["<|vision_end|>"],
        "text_config": {"model_type": "qwen3_vl_text", **_TEXT, **text, "tie_word_embeddings": True},
        "vision_config": {"model_type": "qwen3_vl", **_VISION, **vision, "out_hidden_size": text["hidden_size"]},
    }  # fmt: skip


def ensure_checkpoint(shape: str, folder: Path) -> Path:
    """Returns the directory of a shape's checkpoint below `folder`, and writes it the first time. The random weights
    are the same each time, in bf16."""
    target = folder / shape / "checkpoint"
    if not target.exists():
        partial = target.with_name("checkpoint.partial")
        partial.mkdir(parents=True, exist_ok=True)
        config = shape_config(shape)
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        (partial / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        _write_tokenizer(config["text_config"]["vocab_size"], partial)
        model_class, parsed = read_config(config, media=True)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            _published(name): random_tensor(name, target.shape, generator)
            for name, [target, *_] in model_class(parsed, torch.float32, reference).targets().items()
        }
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(target)
    return target


def _published(name: str) -> str:
    return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Source of the tokens of text: the bundled model, without its first token. The other ids are words that never
    occur."""
    state = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8")) | {"post_processor": None}
    vocab = state["model"]["vocab"]
    taken = set(vocab.values()) | {added["id"] for added in state["added_tokens"]}
    first = vocab_size - len(SPECIAL)
    for index, name in enumerate(SPECIAL, first):
        vocab[name] = index
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        state["added_tokens"].append({"id": index, "content": name, "special": True, **flags})
    vocab |= {f"\u0120w{index}": index for index in range(first) if index not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def ensure_gguf(checkpoint: Path, source: Path, kind: str, is_projector: bool) -> Path:
    """Returns the GGUF file of the text model, or of the tower, with weights of a kind that llama.cpp's converter
    knows: bf16, f16, f32, q8_0. Writes it the first time. `source` is llama.cpp's source. Raises
    subprocess.CalledProcessError."""
    target = checkpoint.parent / f"{'mmproj' if is_projector else 'text'}-{kind}.gguf"
    if not target.exists():
        convert(source, checkpoint, target, kind, *(["--mmproj"] if is_projector else []))
    return target


def write_image(path: Path, width: int, height: int, seed: int) -> Path:
    """Writes a PNG of soft shapes and noise, another one for each seed."""
    from PIL import Image

    rng = np.random.default_rng((width, height, seed))
    small = Image.fromarray(rng.integers(0, 256, (height // 32, width // 32, 3), np.uint8))
    image = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    image = np.clip(image + rng.integers(-6, 7, image.shape), 0, 255).astype(np.uint8)
    Image.fromarray(image).save(path)
    return path
