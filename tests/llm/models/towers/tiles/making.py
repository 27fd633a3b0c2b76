"""Tiny random models that take images as tiles, whole: with a tokenizer, a chat template, and settings of their
processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split

from tests.llm.models.variants import SIZES, randomise, save_pretrained
from tests.media.samples import draw

IMAGE = 90
"""Id of the placeholder."""
SIDE, PATCH, SCALE = 24, 4, 2
"""Side of a tile and of a patch in pixels, and side of the square of patches that becomes a token."""
TILE_TOKENS = (SIDE // PATCH // SCALE) ** 2
TEXT = {
    **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 600, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH,
}  # fmt: skip
LFM2_TEXT = {
    **TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
LFM2_VISION = {
    "model_type": "siglip2_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "patch_size": PATCH, "num_patches": 25, "vision_use_head": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "idefics3": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "scale_factor": SCALE},
    "smolvlm": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "scale_factor": SCALE},
    "lfm2_vl": {
        "text_config": LFM2_TEXT, "vision_config": LFM2_VISION, "downsample_factor": SCALE, "projector_hidden_size": 40,
    },
}  # fmt: skip
"""Fields of a config, by model_type."""
SETTINGS: dict[str, dict[str, Any]] = {
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 3 * SIDE},
        "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": True, "do_pad": True, "resample": 1,
    },
    "lfm2_vl": {
        "image_processor_type": "Lfm2VlImageProcessorFast", "tile_size": SIDE, "encoder_patch_size": PATCH,
        "downsample_factor": SCALE, "min_image_tokens": 4, "max_image_tokens": 12, "max_tiles": 6,
    },
}  # fmt: skip
SETTINGS["smolvlm"] = SETTINGS["idefics3"] | {"image_processor_type": "SmolVLMImageProcessor", "video_sampling": {}}
SPECIAL = {
    IMAGE: "<image>", 91: "<fake_token_around_image>", 92: "<global-img>", 93: "<end_of_utterance>",
    94: "<|im_start|>", 95: "<|image_start|>", 96: "<|image_end|>", 97: "<|img_thumbnail|>",
    **{70 + 3 * row + column: f"<row_{row + 1}_col_{column + 1}>" for row in range(3) for column in range(3)},
    **{80 + 3 * row + column: f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(3) for column in range(3)},
}  # fmt: skip
TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m.role }}:{% if m.content is string %} {{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %} {{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tiled(folder: Path, model_type: str, **fields: Any) -> torch.nn.Module:
    """Saves a tiny random model in float32, and returns it. `fields` are merged into those of its config."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    given = dict(MODELS[model_type])
    for name, value in fields.items():
        given[name] = given.get(name, {}) | value if isinstance(value, dict) else value
    config = AutoConfig.for_model(model_type, image_token_id=IMAGE, **given)
    torch.manual_seed(sum(map(ord, model_type)))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, model_type)
    save_pretrained(model, folder)
    return model


def save_processor(folder: Path, model_type: str) -> None:
    """Saves the settings of the processor, and a tokenizer of the words w7 to w69, line breaks and special tokens."""
    words = {"<unk>": 0, "\n": 2, "\n\n": 3, ":": 4, "user": 5, "assistant": 6}
    words |= {f"w{index}": index for index in range(7, 70)}
    tokenizer = Tokenizer(WordLevel(words | {name: index for index, name in SPECIAL.items()} | {"<s>": 1}, "<unk>"))
    splits = [Split(Regex(" +"), "removed"), Split(Regex("\n+|:"), "isolated")]
    tokenizer.pre_tokenizer = Sequence(splits)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS[model_type]))


def chat(sizes: list[tuple[int, int]]) -> list[dict]:
    parts = [{"type": "image", "image": draw(*size)} for size in sizes]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "w9 w8"}]}]
