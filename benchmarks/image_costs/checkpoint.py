"""Shapes with towers as checkpoints with random weights, as GGUF files for llama.cpp, and random images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.comparison.checkpoint import random_tensor
from benchmarks.comparison.convert import convert
from benchmarks.image_costs.families import FAMILIES, Family, Size
from pace.assets import TINY
from pace.bench.shapes import SHAPES
from pace.llm.models.model_list import read_config
from pace.ops import reference

NAMES = ("qwen3-vl-2b", "gemma-3-4b-vl", "smolvlm-500m", "qwen3.5-4b-vl")
"""Shapes of `pace bench`."""
TINY_NAMES = tuple(f"{name}-tiny" for name in NAMES)
"""The same families with small layers."""
WHOLE = ("architectures", "model_type", "scale_factor", "tie_word_embeddings")
"""Fields of a shape that are outside of `text_config`."""
BREAKS = "\u010a\u010a"
"""Two line breaks, as a vocabulary spells them."""


def family_of(shape: str) -> type[Family]:
    """The family of a shape of `NAMES` or `TINY_NAMES`."""
    return FAMILIES[SHAPES[shape.removesuffix("-tiny")]["model_type"]]


def shape_config(shape: str) -> dict[str, Any]:
    """The config.json of a shape, in the published layout. Special tokens are the last ids of the vocabulary."""
    family, is_tiny = family_of(shape), shape.endswith("-tiny")
    fields = dict(SHAPES[shape.removesuffix("-tiny")])
    vision = fields.pop("vision_config") | family.vision | (family.tiny_vision if is_tiny else {})
    whole = {name: fields.pop(name) for name in WHOLE if name in fields}
    fields.pop("image_token_id", None)
    text = fields | family.text | (family.tiny_text if is_tiny else {})
    text["tie_word_embeddings"] = whole["tie_word_embeddings"]
    ids = special_ids(family, text["vocab_size"])
    return {
        **whole, **family.whole(vision), **{field: ids[token] for field, token in family.ids.items()},
        "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, "text_config": text,
        "vision_config": vision,
    }  # fmt: skip


def special_ids(family: type[Family], vocab_size: int) -> dict[str, int]:
    return dict(zip(family.tokens, range(vocab_size - len(family.tokens), vocab_size)))


def sizes_of(shape: str) -> tuple[Size, ...]:
    """Sizes of images that need no resizing, from few to many tokens."""
    return family_of(shape).sizes(shape_config(shape)["vision_config"])


def ensure_checkpoint(shape: str, folder: Path) -> Path:
    """Returns the directory of a shape's checkpoint below `folder`, and writes it the first time. The random weights
    are the same each time, in bf16."""
    target = folder / shape / "checkpoint"
    if not target.exists():
        partial = target.with_name("checkpoint.partial")
        partial.mkdir(parents=True, exist_ok=True)
        config, family = shape_config(shape), family_of(shape)
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        settings = family.processor(config["vision_config"]) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (partial / "preprocessor_config.json").write_text(json.dumps(settings))
        _write_tokenizer(family, config["text_config"]["vocab_size"], partial)
        model_class, parsed = read_config(config, media=True)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            published(name, family): random_tensor(name, target.shape, generator)
            for name, [target, *_] in model_class(parsed, torch.float32, reference).targets().items()
        }
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(target)
    return target


def published(name: str, family: type[Family]) -> str:
    """The name of a tensor in a published checkpoint."""
    beginning = next((beginning for beginning in family.names if name.startswith(beginning)), "")
    return family.names.get(beginning, "") + name.removeprefix(beginning)


def _write_tokenizer(family: type[Family], vocab_size: int, folder: Path) -> None:
    """Source of the tokens of text: the bundled model, without its first token. Two line breaks are one token, which
    llama.cpp needs for SmolVLM. The other ids are words that never occur."""
    state = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8")) | {"post_processor": None}
    vocab = state["model"]["vocab"]
    taken = set(vocab.values()) | {added["id"] for added in state["added_tokens"]}
    vocab[BREAKS] = len(taken)
    state["model"]["merges"].append([BREAKS[0], BREAKS[1]])
    for name, index in (special := special_ids(family, vocab_size)).items():
        vocab[name] = index
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        state["added_tokens"].append({"id": index, "content": name, "special": True, **flags})
    others = range(len(taken) + 1, vocab_size - len(special))
    vocab |= {f"\u0120w{index}": index for index in others}
    (folder / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def ensure_gguf(checkpoint: Path, source: Path, kind: str, is_projector: bool) -> Path:
    """Returns the GGUF file of the text model, or of the tower, with weights of a kind that llama.cpp's converter
    knows: bf16, f16, f32, q8_0. Writes it the first time. `source` is llama.cpp's source. Raises
    subprocess.CalledProcessError."""
    target = checkpoint.parent / f"{'mmproj' if is_projector else 'text'}-{kind}.gguf"
    if not target.exists():
        family = family_of(checkpoint.parent.name)
        convert(source, checkpoint, target, kind, *(["--mmproj"] if is_projector else family.text_options))
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
