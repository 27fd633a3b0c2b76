"""Tiny random checkpoints of the families whose projectors llama.cpp's converter writes, and their text parts as
checkpoints of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.llm.models.rotations import mrope
from tests.llm.models.towers.gemma.gemma4_models import randomise_tower
from tests.llm.models.variants import SIZES, randomise, save_pretrained

IMAGE, SOUND = 90, 91
"""Ids of the placeholders."""
HIDDEN = SIZES["hidden_size"]
TEXT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
SQUARE: dict[str, Any] = {**TOWER, "image_size": 32}
GEMMA: dict[str, Any] = {**TEXT, "head_dim": 8, "sliding_window": 40}
GEMMA4: dict[str, Any] = {
    **GEMMA, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16,
    "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
}  # fmt: skip
MISTRAL: dict[str, Any] = {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": GEMMA, "vision_config": SQUARE, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": GEMMA4,
        "vision_config": {
            **TOWER, "num_key_value_heads": 2, "head_dim": 12, "position_embedding_size": 80,
            "use_clipped_linears": True, "standardize": True,
        },
        "audio_config": None,
    },
    "gemma4_unified": {
        "text_config": GEMMA4,
        "vision_config": {"patch_size": 4, "mm_embed_dim": HIDDEN, "mm_posemb_size": 80, "output_proj_dims": HIDDEN},
        "audio_config": None,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": {**SQUARE, "patch_size": 4}, "scale_factor": 2,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**SQUARE, "image_size": [32, 32], "patch_size": [4, 4], "attention_bias": True},
    },
    "lfm2_vl": {
        "text_config": {
            **TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
        },
        "vision_config": {"model_type": "siglip2_vision_model", **TOWER, "num_patches": 25, "vision_use_head": False},
        "projector_hidden_size": 40,
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **SQUARE},
    },
    "ministral3": {
        "text_config": {
            **MISTRAL, "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
        "vision_config": {"model_type": "pixtral", **SQUARE, "hidden_act": "silu"}, "spatial_merge_size": 2,
    },
    "mistral3": {
        "text_config": MISTRAL, "vision_config": {"model_type": "pixtral", **SQUARE, "hidden_act": "silu"},
        "spatial_merge_size": 2,
    },
    "paddleocr_vl": {
        "text_config": {**TEXT, "head_dim": 16, **mrope([4, 2, 2])}, "vision_config": {**SQUARE, "image_size": 24},
    },
    "pixtral": {
        "text_config": MISTRAL, "vision_config": {"model_type": "pixtral", **SQUARE, "hidden_act": "gelu"},
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    },
}  # fmt: skip
"""Fields of a config.json. Pixtral is a LLaVA, and Ministral 3 a Mistral 3 with another text model."""
SOUNDS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "subsampling_conv_channels": [16, 6],
        "output_proj_dims": 20,
    },
    "gemma4_unified": {"audio_embed_dim": 320},
}  # fmt: skip
"""Fields of `audio_config` in families that may have one. Files do not state the others."""
MODEL_TYPES = {"pixtral": "llava", "ministral3": "mistral3"}
TEXT_PREFIXES = r"(model\.)?(language_model\.model|language_model|text_model)\."
TOWER_PARTS = (
    "vision_tower|audio_tower|vision_model|visual|vision_embedder|embed_vision|embed_audio|multi_modal_projector|connector"
    "|projector|mlp_AR"
)


def save_whole(folder: Path, family: str, **fields: Any) -> torch.nn.Module:
    """Saves a tiny model in float32, and returns it. `fields` are merged into those of its config."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    given: dict[str, Any] = dict(MODELS[family])
    for name, value in fields.items():
        given[name] = (given.get(name) or {}) | value if isinstance(value, dict) else value
    model_type = MODEL_TYPES.get(family, family)
    token = (
        "image_token_index" if family in ("gemma3", "llava", "ministral3", "mistral3", "pixtral") else "image_token_id"
    )
    config = AutoConfig.for_model(model_type, **{token: IMAGE}, **given)
    torch.manual_seed(sum(map(ord, family)))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomise(model, model_type)
    if family == "gemma4":
        randomise_tower(model)
    save_pretrained(model, folder)
    return model


def save_text(hub: Path, folder: Path) -> dict[str, Any]:
    """Saves the text part of a checkpoint as one of its own, and returns its config.json."""
    whole = json.loads((hub / "config.json").read_text())
    config = whole["text_config"] | {"tie_word_embeddings": whole.get("tie_word_embeddings", False)}
    state = {}
    for name, tensor in load_file(hub / "model.safetensors").items():
        if not re.match(rf"(model\.)?({TOWER_PARTS})\b", name):
            name = re.sub(r"^(language_model\.)?lm_head\.", "lm_head.", name)
            state[name if name.startswith("lm_head.") else re.sub(rf"^{TEXT_PREFIXES}", "model.", name)] = tensor
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return config
