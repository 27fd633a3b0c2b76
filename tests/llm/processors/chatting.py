"""A tiny random model that takes images, whole: with a tokenizer, a chat template and settings of its processor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.llm.models.towers.seeing import IMAGE, MERGE, PATCH, save_seeing

TOKEN, PLACEHOLDER = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = {IMAGE: TOKEN, 92: "<|vision_start|>", 93: "<|vision_end|>", 94: "<|im_start|>", 95: "<|im_end|>"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}" + PLACEHOLDER + "{% elif 'text' in p %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
}  # fmt: skip


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def save_tokenizer(path: Path, special: dict[int, str]) -> None:
    """Saves a tokenizer of the words w1 to w89, and of `special` ones."""
    words = {"<unk>": 0, **{f"w{index}": index for index in range(1, 90) if index not in special}}
    tokenizer = Tokenizer(WordLevel(words | {name: index for index, name in special.items()}, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    names = [name for name in special.values() if name.startswith("<|")]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    plain = [name for name in special.values() if name.startswith("<") and name not in names]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in plain])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def save_chatting(path: Path, model_type: str = "qwen3_vl") -> torch.nn.Module:
    """Saves the checkpoint, and returns the model in transformers."""
    oracle = save_seeing(path, model_type)
    save_tokenizer(path, SPECIAL | {91: "user"})
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return oracle
