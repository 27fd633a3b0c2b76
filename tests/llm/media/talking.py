"""A tiny random Qwen3.5 that takes images. Tokenizer and template are those of the bundled model, so that answers can
follow a grammar."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer

from pace.assets import TINY
from pace.llm import LLMModel
from tests.llm.models.towers.seeing import save_seeing
from tests.llm.processors.chatting import SETTINGS

SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
FIRST_ID = 2048
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = {"do_sample": False, "max_new_tokens": 10}


def save_talking(folder: Path, model_type: str = "qwen3_5", **vision: Any) -> torch.nn.Module:
    """Saves the checkpoint, and returns the model in transformers. `vision` changes fields of its tower."""
    text = {"vocab_size": FIRST_ID + 8, "max_position_embeddings": 2048}
    oracle = save_seeing(folder, model_type, text, vision, FIRST_ID)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder / name)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return oracle


def load(folder: Path, **options: Any) -> LLMModel:
    return LLMModel(folder, **{"dtype": "float32", "progress": False, "kv_cache_bytes": "16MiB", **options})


def page(number: int = 0) -> Image.Image:
    """A page with a title, lines of text and a table."""
    image = Image.new("RGB", (96, 128), "white")
    pen = ImageDraw.Draw(image)
    pen.text((6, 4), f"Invoice {number}", fill="black")
    for line in range(5):
        pen.text((6, 22 + 11 * line), f"{line + number}: {7 * line + number} apples", fill=(30, 30, 30))
    for row in range(4):
        pen.rectangle((6, 82 + 10 * row, 88, 92 + 10 * row), outline="black")
        pen.text((10, 82 + 10 * row), str(11 * row + number), fill=(160, 20, 20))
    return image


def user(*parts: Any) -> dict[str, Any]:
    """A user's turn of texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": "user", "content": content}


def num_encoded(model: LLMModel) -> int:
    """Number of images that the tower has encoded."""
    return model.generator.engine.media.num_encoded
