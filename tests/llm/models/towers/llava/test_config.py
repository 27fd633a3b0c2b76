"""Configs of Mistral 3, Pixtral and LLaVA: defaults of transformers, published checkpoints, and what is refused."""

from __future__ import annotations

import pytest

from pace.llm.models.model_list import read_config
from tests.llm.models.towers.checks import check_refused_config
from tests.llm.models.towers.llava.making import CASES, CLIP, FULL, IMAGE, PIXTRAL, SIGLIP, TEXT

PIXTRAL_VISION = {
    "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
    "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
    "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
}  # fmt: skip
PUBLISHED = {
    "Mistral-Small-3.1-24B-Instruct-2503": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "text_config": {"hidden_size": 5120, "model_type": "mistral", "rms_norm_eps": 1e-05},
            "vision_config": PIXTRAL_VISION, "vision_feature_layer": -1,
        },
        ("Mistral3ForConditionalGeneration", 24, 64, "silu", 14, 10, 5120, 1e-5),
    ),
    "Ministral-3-3B-Instruct-2512": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "text_config": {"hidden_size": 3072, "model_type": "ministral3", "rms_norm_eps": 1e-05},
            "vision_config": {
                **{name: value for name, value in PIXTRAL_VISION.items() if name != "rope_theta"},
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "vision_feature_layer": -1,
        },
        ("Mistral3ForConditionalGeneration", 24, 64, "silu", 14, 10, 3072, 1e-5),
    ),
    "pixtral-12b": (
        {
            "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_seq_length": 1,
            "image_token_index": 10, "model_type": "llava", "projector_hidden_act": "gelu",
            "text_config": {
                "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "is_composition": True,
                "max_position_embeddings": 1024000, "model_type": "mistral", "num_hidden_layers": 40,
                "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None,
                "vocab_size": 131072,
            },
            "vision_config": {
                "head_dim": 64, "hidden_act": "silu", "image_size": 1024, "is_composition": True,
                "model_type": "pixtral", "patch_size": 16, "rope_theta": 10000.0, "tie_word_embeddings": False,
            },
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        ("LlavaOfMistral", 24, 64, "silu", 16, 10, 5120, 1e-5),
    ),
    "llava-1.5-7b-hf": (
        {
            "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
            "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu",
            "text_config": {
                "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
                "rms_norm_eps": 1e-05, "vocab_size": 32064,
            },
            "tie_word_embeddings": False,
            "vision_config": {
                "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
                "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
                "vocab_size": 32000,
            },
            "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        },
        ("LlavaForConditionalGeneration", 23, 64, "quick_gelu", 14, 32000, 4096, 1e-5),
    ),
    "llava-interleave-qwen-0.5b-hf": (
        {
            "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 151646,
            "model_type": "llava", "projector_hidden_act": "gelu",
            "text_config": {
                "hidden_size": 1024, "intermediate_size": 2816, "max_window_layers": 21, "model_type": "qwen2",
                "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rope_theta": 1000000.0,
                "tie_word_embeddings": True, "vocab_size": 152000,
            },
            "vision_config": {
                "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
                "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
            },
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        ("LlavaOfQwen2", 26, 72, "gelu_tanh", 14, 151646, 1024, 1e-6),
    ),
}  # fmt: skip
"""Fields about images of published checkpoints; the class, and what is read of the tower and the projector."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name) -> None:
    fields, expected = PUBLISHED[name]
    model, config = read_config(fields, media=True)
    vision, projector = config.vision, config.projector
    blocks = max(projector.layers(vision.num_hidden_layers))
    sizes = blocks, vision.head_dim, vision.hidden_act, vision.patch_size
    found = (model.__name__, *sizes, config.image_token_id, projector.out_hidden_size, projector.eps)
    assert found == expected
    assert config.tie_word_embeddings == (name in ("llava-interleave-qwen-0.5b-hf", *list(PUBLISHED)[:2]))
    assert read_config(fields)[1].vision is None


def config_of(name: str, vision: dict | None = None, text: dict | None = None, **fields) -> dict:
    case = CASES[name]
    whole = {
        "model_type": case.model_type, "text_config": TEXT | case.text | (text or {}), "image_token_index": IMAGE,
        "vision_config": case.vision | (vision or {}),
    }  # fmt: skip
    return whole | case.fields | fields


@pytest.mark.parametrize("model_type, kind", [
    ("mistral3", "pixtral"), ("llava", "pixtral"), ("llava", "clip_vision_model"), ("llava", "siglip_vision_model")
])  # fmt: skip
def test_fields_that_are_left_out_have_the_defaults_of_transformers(model_type, kind) -> None:
    transformers = pytest.importorskip("transformers")
    least = {"text_config": {"model_type": "mistral"}, "vision_config": {"model_type": kind}}
    if kind == "pixtral" and model_type == "llava":
        least |= FULL
    whole = transformers.AutoConfig.for_model(model_type, **least).to_dict()
    ours, theirs = (read_config({"model_type": model_type} | fields, media=True)[1] for fields in (least, whole))
    assert ours.vision.theta == theirs.vision.theta if kind == "pixtral" else ours.vision == theirs.vision
    assert ours.vision.patches_per_side == theirs.vision.patches_per_side and ours.projector == theirs.projector
    assert ours.image_token_id == theirs.image_token_id


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (config_of("mistral3", {"model_type": "clip_vision_model"}), NotImplementedError, "model_type = 'clip_vision"),
        (config_of("mistral3", {"num_attention_heads": 8}), ValueError, "num_attention_heads must be even; got 24 and"),
        (config_of("mistral3", {"num_attention_heads": 5}), ValueError, "must be a multiple of num_attention_heads"),
        (config_of("mistral3", {"hidden_act": "mish"}), NotImplementedError, r"vision_config\.hidden_act.*mish"),
        (config_of("mistral3", {"spatial_merge_size": 2}), NotImplementedError, "spatial_merge_size = 2"),
        (config_of("mistral3", {"rope_parameters": 5}), ValueError, "rope_parameters must be an object or null; got 5"),
        (config_of("mistral3", {"rope_parameters": {"rope_type": "yarn"}}), NotImplementedError, "rope_type = 'yarn'"),
        (config_of("mistral3", {"rope_scaling": {"factor": 2}}), NotImplementedError, "vision_config.rope_scaling"),
        (config_of("mistral3", spatial_merge_size=0), ValueError, "spatial_merge_size must be an integer in 1..16"),
        (config_of("mistral3", vision_feature_layer=[-1, -2]), NotImplementedError, "implemented: one layer"),
        (config_of("mistral3", vision_feature_layer=4), ValueError, r"vision_feature_layer must be in -4\.\.3; got 4"),
        (config_of("mistral3", vision_feature_layer=[]), ValueError, "vision_feature_layer must be the number of a"),
        (config_of("mistral3", image_token_index=-1), ValueError, "image_token_index must be a token's id; got -1"),
        (config_of("mistral3", multimodal_projector_bias=1), ValueError, "multimodal_projector_bias must be true or"),
        (config_of("mistral3", projector_hidden_act="mish"), NotImplementedError, "projector_hidden_act.*mish"),
        (config_of("pixtral", vision_feature_select_strategy="default"), NotImplementedError, "implemented: full"),
        (config_of("llava", vision_feature_select_strategy="cls"), ValueError, "must be one of default, full"),
        (config_of("llava", vision_feature_layer=-5), ValueError, "vision_feature_layer must be in -4..3; got -5"),
        (config_of("llava", {"model_type": "dinov2"}), NotImplementedError, "implemented: clip_vision_model, pixtral"),
        (config_of("llava", {"model_type": []}), NotImplementedError, "implemented: clip_vision_model, pixtral"),
        (config_of("llava", {"image_size": [14, 10]}), NotImplementedError, "image_size"),
        (config_of("siglip", {"spatial_merge_size": 2}), NotImplementedError, "spatial_merge_size = 2"),
        (config_of("llava") | {"vision_config": 5}, ValueError, "vision_config must be an object; got 5"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(config, error, message) -> None:
    check_refused_config(config, error, message)


def test_a_kind_of_text_that_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="text_config.model_type = 'gemma2' .* Llava; implemented: llama, "):
        read_config(config_of("llava", text={"model_type": "gemma2"}))
    assert {PIXTRAL["model_type"], CLIP["model_type"], SIGLIP["model_type"]} == {
        case.vision["model_type"] for case in CASES.values()
    }
