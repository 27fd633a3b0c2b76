"""Tiny random models that take images, or images and sound, whole: with a tokenizer, a chat template and settings of
their processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.llm.models.towers import omni
from tests.llm.models.towers.hearing import MELS
from tests.llm.models.towers.seeing import IMAGE, MERGE, PATCH, save_seeing
from tests.media.drawn import pictures

TOKEN, PLACEHOLDER = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
SOUND_TOKEN, SOUND_PLACEHOLDER = "<|audio_pad|>", "<|audio_start|><|audio_pad|><|audio_end|>"
SPECIAL = {IMAGE: TOKEN, 92: "<|vision_start|>", 93: "<|vision_end|>", 94: "<|im_start|>", 95: "<|im_end|>"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}"
    + PLACEHOLDER
    + "{% elif p.type == 'audio' %}"
    + SOUND_PLACEHOLDER
    + "{% elif 'text' in p %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
}  # fmt: skip
OMNI_SPECIAL = {
    omni.IMAGE: TOKEN, omni.IMAGE_START: "<|vision_start|>", omni.IMAGE_END: "<|vision_end|>", omni.CLIP: SOUND_TOKEN,
    omni.SOUND_START: "<|audio_start|>", omni.SOUND_END: "<|audio_end|>", 97: "<|im_start|>", 98: "<|im_end|>",
}  # fmt: skip
OMNI_SETTINGS = {
    "chunk_length": 300, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS,
    "hop_length": 160, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.5, 0.5, 0.5], "max_pixels": 4096, "merge_size": MERGE, "min_pixels": 64, "n_fft": 400,
    "n_samples": 4800000, "nb_max_frames": 30000, "padding_side": "left", "padding_value": 0.0, "patch_size": PATCH,
    "processor_class": "Qwen3OmniMoeProcessor", "return_attention_mask": True, "sampling_rate": 16000,
    "temporal_patch_size": 2,
}  # fmt: skip
"""Settings of images and sound in one file, as published."""


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


def save_omni_chatting(path: Path, vision: dict[str, Any] | None = None, max_pixels: int = 4096) -> torch.nn.Module:
    """Saves a tiny random Qwen3-Omni, and returns its thinker in transformers. `vision` changes fields of its
    `vision_config`."""
    oracle = omni.save_omni(path, vision=vision)
    save_tokenizer(path, OMNI_SPECIAL)
    (path / "preprocessor_config.json").write_text(json.dumps(OMNI_SETTINGS | {"max_pixels": max_pixels}))
    return oracle


QUESTION = "w3 w4"
ANSWER = {"temperature": 0, "max_new_tokens": 12}
"""How the answer about the drawn pictures is generated."""


def question(clip: bytes | None = None, **sources: Any) -> list[dict[str, Any]]:
    """One user turn in `LLMModel.chat`: the drawn pictures, a clip if there is one, and a text. Every entry must get
    the same answer to it. `sources` replaces pictures, by their names without an ending."""
    images = [sources.get(name.partition(".")[0], data) for name, data in pictures().items()]
    parts = [{"type": "image", "image": image} for image in images]
    parts += [] if clip is None else [{"type": "audio", "audio": clip}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
