"""Tiny random models of LLaVA's kind, in transformers and here, and the inputs that a processor would make."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from tests.editing import edit_tensors
from tests.llm.models.towers.prompts import inputs_of_tokens, prompt_around, together
from tests.llm.models.variants import SIZES, randomise, save_pretrained

IMAGE, BREAK, END = 90, 91, 92
"""Ids of the placeholder, and of the tokens after a row and after the last row of Pixtral's images."""
PATCH = 4
TEXT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 3, "max_position_embeddings": 600,
    "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1, "sliding_window": None,
}  # fmt: skip
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 64, "patch_size": PATCH, "hidden_act": "silu",
}  # fmt: skip
SQUARE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 14,
    "patch_size": PATCH,
}  # fmt: skip
"""Fields of CLIP and SigLIP. Patches do not fill the image."""
Sizes = list[tuple[int, int]]
"""Rows and columns of tokens of images; for CLIP and SigLIP only their number counts."""


@dataclass(frozen=True)
class Case:
    """A model: fields of its `text_config`, its `vision_config`, and the whole config."""

    model_type: str
    text: dict[str, Any]
    vision: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> int:
        """Pixels on the side of a token of Pixtral."""
        return PATCH * self.fields.get("spatial_merge_size", 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of an image of CLIP or SigLIP."""
        rows = (self.vision["image_size"] // PATCH) ** 2 + (self.vision["model_type"] == "clip_vision_model")
        return rows - (self.fields.get("vision_feature_select_strategy", "default") == "default")


CLIP, SIGLIP = {**SQUARE, "model_type": "clip_vision_model"}, {**SQUARE, "model_type": "siglip_vision_model"}
FULL = {"vision_feature_select_strategy": "full"}
GROWS = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
CASES = {
    "mistral3": Case("mistral3", {"model_type": "mistral"}, PIXTRAL, {"spatial_merge_size": 2}),
    "ministral3": Case(
        "mistral3", {"model_type": "ministral3", "rope_parameters": GROWS},
        PIXTRAL | {"hidden_act": "gelu", "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"spatial_merge_size": 3, "multimodal_projector_bias": True, "vision_feature_layer": [-2]},
    ),
    "mistral3 llama": Case(
        "mistral3", {"model_type": "llama"}, PIXTRAL, {"spatial_merge_size": 1, "tie_word_embeddings": False}
    ),
    "mistral3 qwen2": Case("mistral3", {"model_type": "qwen2"}, PIXTRAL, {"spatial_merge_size": 2}),
    "pixtral": Case(
        "llava", {"model_type": "mistral", "sliding_window": 9}, PIXTRAL | {"num_attention_heads": 4},
        FULL | {"vision_feature_layer": -1},
    ),
    "pixtral layers": Case("llava", {"model_type": "llama"}, PIXTRAL, FULL | {"vision_feature_layer": [3, 0, -2]}),
    "llava": Case("llava", {"model_type": "llama"}, CLIP),
    "llava full": Case(
        "llava", {"model_type": "mistral"}, CLIP,
        FULL | {"vision_feature_layer": [1, -1], "multimodal_projector_bias": False, "projector_hidden_act": "relu"},
    ),
    "gemma": Case("llava", {"model_type": "gemma"}, CLIP),
    "gemma tied": Case("llava", {"model_type": "gemma"}, SIGLIP, FULL | {"tie_word_embeddings": True}),
    "siglip": Case("llava", {"model_type": "qwen2"}, SIGLIP, FULL | {"vision_feature_layer": -1}),
    "siglip qwen3": Case("llava", {"model_type": "qwen3"}, SIGLIP),
    "phi3": Case("llava", {"model_type": "phi3", "num_key_value_heads": 4}, CLIP, {"vision_feature_layer": -4}),
}  # fmt: skip


def save_llava(folder: Path, case: Case) -> torch.nn.Module:
    """Saves a tiny random model in float32, and returns it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(
        case.model_type, text_config=TEXT | case.text, vision_config=case.vision, image_token_index=IMAGE,
        **case.fields,
    )  # fmt: skip
    torch.manual_seed(12)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, case.model_type)
    save_pretrained(model, folder)
    model.generation_config.eos_token_id = None
    return model


def rename(folder: Path, published: bool) -> None:
    """Renames the tensors of a checkpoint to those of the Hub, or to those of the modules in transformers 5."""
    to_old = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.image_newline": "image_newline",
    }

    def old_name(name: str) -> str:
        old = next((prefix for prefix in to_old if name.startswith(prefix)), "")
        name = to_old.get(old, "") + name.removeprefix(old)
        inner = name.removeprefix("vision_tower.")
        return (
            f"vision_tower.vision_model.{inner}"
            if has_inner and inner != name and "vision_model" not in inner
            else name
        )

    def new_name(name: str) -> str:
        name = old_name(name).replace("vision_tower.vision_model.", "vision_tower.")
        new = next(prefix for prefix, old in to_old.items() if name.startswith(old))
        return new + name.removeprefix(to_old[new])

    with edit_tensors(folder) as state:
        has_inner = any("vision_model." in name or "class_embedding" in name for name in state)
        renamed = old_name if published else new_name
        state |= {renamed(name): state.pop(name) for name in list(state)}


def media_inputs(case: Case, sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """Random images as a processor gives them. Pixtral's are padded to the largest one, with numbers that count for
    nothing."""
    if not sizes:
        return {}
    generator = torch.Generator().manual_seed(seed)
    if case.vision["model_type"] != "pixtral":
        side = case.vision["image_size"]
        return {"pixel_values": torch.randn(len(sizes), 3, side, side, generator=generator)}
    pixels = torch.tensor(sizes) * case.unit
    values = torch.randn(len(sizes), 3, *pixels.amax(0).tolist(), generator=generator)
    return {"pixel_values": values, "image_sizes": pixels}


def rows_of_image(rows: int, columns: int) -> list[int]:
    """Tokens of an image of Pixtral."""
    return ([IMAGE] * columns + [BREAK]) * (rows - 1) + [IMAGE] * columns + [END]


def inputs_of(case: Case, sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """What a processor makes of a prompt with images of these sizes."""
    is_pixtral = case.vision["model_type"] == "pixtral"
    images = [rows_of_image(*size) if is_pixtral else [IMAGE] * case.num_tokens for size in sizes]
    return inputs_of_tokens(prompt_around(images, seed)) | media_inputs(case, sizes, seed)


def batch_of(case: Case, images: list[Sizes]) -> dict[str, Tensor]:
    """The prompts and images of `inputs_of(case, images[index], index)` as one batch."""
    return together([inputs_of(case, each, index) for index, each in enumerate(images)], pad_value=7.0)


TEMPLATE = (
    "{{% for m in messages %}}<{{{{ m.role }}}}> {{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}"
    "{{% for p in m.content %}}{{% if p.type == 'image' %}}{token}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}} {{% endfor %}}"
)
PIXTRAL_SETTINGS: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor", "resample": 3,
    "size": {"longest_edge": 40}, "patch_size": {"height": PATCH, "width": PATCH}, "do_center_crop": None,
    "crop_size": None,
}  # fmt: skip
LLAVA_SETTINGS: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor",
    "size": {"shortest_edge": SQUARE["image_size"]}, "do_center_crop": True, "resample": 3,
    "crop_size": {"height": SQUARE["image_size"], "width": SQUARE["image_size"]},
}  # fmt: skip


def save_processor(folder: Path, case: Case) -> None:
    """Saves a tokenizer of the words w1 to w89 and the tokens of images, a chat template and the settings of images."""
    is_pixtral = case.vision["model_type"] == "pixtral"
    special = {IMAGE: "[IMG]", BREAK: "[IMG_BREAK]", END: "[IMG_END]"} if is_pixtral else {IMAGE: "<image>"}
    words = {"<unk>": 0, **{f"w{index}": index for index in range(1, 90)}}
    tokenizer = Tokenizer(WordLevel(words | {name: index for index, name in special.items()}, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<unk>"}
    template = TEMPLATE.format(token=special[IMAGE])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    of_images = PIXTRAL_SETTINGS if is_pixtral else LLAVA_SETTINGS
    (folder / "preprocessor_config.json").write_text(json.dumps(of_images))


def whole_pixtral() -> Any:
    """The class of the whole processor in transformers, which takes the PIL image processor as well. Its own import
    needs torchvision."""
    from transformers.models.pixtral import image_processing_pil_pixtral

    name = "transformers.models.pixtral.image_processing_pixtral"
    sys.modules[name] = image_processing_pil_pixtral
    try:
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    finally:
        del sys.modules[name]
    return PixtralProcessor
