"""The `vision_config` of a config.json: its defaults are those of transformers, and wrong fields are named."""

from __future__ import annotations

import pytest

from pace.llm.models.families.qwen_vl import SeesImages
from pace.llm.models.model_list import MODEL_LIST, read_config
from pace.llm.models.towers.qwen_vision_config import (
    Qwen2_5VisionConfig,
    Qwen2VisionConfig,
    Qwen3_5VisionConfig,
    Qwen3VisionConfig,
)
from tests.llm.models.published.published_dense import DENSE
from tests.llm.models.states.published_hybrids import HYBRIDS
from tests.llm.models.towers.checks import check_refused_config
from tests.llm.models.towers.seeing import IMAGE, MODELS

KINDS = {
    "qwen2_vl": Qwen2VisionConfig,
    "qwen2_5_vl": Qwen2_5VisionConfig,
    "qwen3_vl": Qwen3VisionConfig,
    "qwen3_vl_moe": Qwen3VisionConfig,
    "qwen3_5": Qwen3_5VisionConfig,
    "qwen3_5_moe": Qwen3_5VisionConfig,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_fields_that_are_left_out_have_the_defaults_of_transformers(model_type) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoConfig.for_model(model_type).to_dict()["vision_config"]
    assert KINDS[model_type].read({}) == KINDS[model_type].read(whole)


PUBLISHED = {
    "Qwen2.5-VL-3B-Instruct": (
        {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        (32, 1280, 80, 3420, "silu", 2048, (16, 24, 24)),
    ),
    "Qwen2-VL-2B-Instruct": (
        {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
        (32, 1280, 80, 5120, "quick_gelu", 1536, (16, 24, 24)),
    ),
    "Qwen3-VL-4B-Instruct": (
        {
            "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096,
            "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        (24, 1024, 64, 4096, "gelu_tanh", 2560, (24, 20, 20)),
    ),
    "Qwen3.5-27B": (
        {
            "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
            "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5",
            "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        (27, 1152, 72, 4304, "gelu_tanh", 5120, (11, 11, 10)),
    ),
    "Qwen3.5-35B-A3B": (
        {
            "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
            "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_5_moe", "num_heads": 16,
            "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        (27, 1152, 72, 4304, "gelu_tanh", 2048, (11, 11, 10)),
    ),
}  # fmt: skip
"""`vision_config` of published checkpoints; what is read of it, and the sections of the rotation."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name) -> None:
    fields, expected = PUBLISHED[name]
    of_text = (DENSE | HYBRIDS)[name]
    config = read_config(of_text | {"vision_config": fields, "image_token_id": 151655}, media=True)[1]
    of, rope = config.vision, config.rope
    sizes = of.depth, of.hidden_size, of.head_dim, of.intermediate_size, of.hidden_act, of.out_hidden_size
    assert (*sizes, rope.sections) == expected


def config_of(model_type: str, **vision) -> dict:
    text, of_vision = MODELS[model_type]
    return {
        "model_type": model_type, "text_config": text, "vision_config": of_vision | vision, "image_token_id": IMAGE
    }  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
def test_a_tower_is_there_if_the_config_has_one_and_it_is_wanted(model_type) -> None:
    config = config_of(model_type)
    seeing, text = read_config(config, media=True)[1], read_config(config)[1]
    assert seeing.vision is not None and text.vision is None and seeing.image_token_id == IMAGE
    assert read_config({**config, "vision_config": None}, media=True)[1] == text
    flat = {name: value for name, value in config.items() if name != "text_config"} | MODELS[model_type][0]
    assert read_config(flat, media=True)[1].vision == seeing.vision


@pytest.mark.parametrize(
    ("model_type", "fields", "error", "message"),
    [
        ("qwen3_vl", {"patch_size": 0}, ValueError, r"vision_config\.patch_size must be an integer"),
        ("qwen3_vl", {"patch_size": [4, 4]}, ValueError, r"vision_config\.patch_size must be an integer"),
        ("qwen3_vl", {"hidden_act": "mish"}, NotImplementedError, r"vision_config\.hidden_act.*mish"),
        (
            "qwen3_vl",
            {"hidden_size": 20},
            ValueError,
            r"vision_config\.hidden_size must be a multiple of 4 \* num_heads",
        ),
        ("qwen3_vl", {"hidden_size": 4096}, ValueError, r"hidden_size / num_heads must be at most \d+; got 2048"),
        ("qwen3_vl", {"spatial_merge_size": 9}, ValueError, r"spatial_merge_size must be an integer in 1\.\.8"),
        ("qwen3_vl", {"num_position_embeddings": 35}, ValueError, "num_position_embeddings must be a square; got 35"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 4]}, ValueError, "must be below depth, 4; got 4"),
        ("qwen3_vl", {"deepstack_visual_indexes": [1, 1]}, ValueError, "must be a list of different layers"),
        ("qwen3_vl", {"deepstack_visual_indexes": "1"}, ValueError, "must be a list of numbers of layers"),
        ("qwen3_5", {"deepstack_visual_indexes": [1]}, NotImplementedError, r"deepstack_visual_indexes = \[1\]"),
        ("qwen3_vl", {"out_hidden_size": 48}, ValueError, "must be the text's hidden_size, 32; got 48"),
        ("qwen3_vl", {"rope_parameters": {"rope_type": "default"}}, NotImplementedError, "implemented: axial"),
        ("qwen3_vl", {"rope_parameters": 5}, ValueError, r"vision_config\.rope_parameters must be an object or null"),
        ("qwen2_5_vl", {"window_size": 7}, ValueError, r"vision_config\.window_size must be at least 8"),
        ("qwen2_vl", {"mlp_ratio": "4"}, ValueError, "embed_dim and mlp_ratio must be"),
    ],
)
def test_fields_that_are_refused(model_type, fields, error, message) -> None:
    config = config_of(model_type, **fields)
    check_refused_config(config, error, message)
    if fields.get("patch_size") == 0:
        for other in ([], "x"):
            with pytest.raises(ValueError, match="vision_config must be an object"):
                read_config({**config, "vision_config": other}, media=True)
        for placeholder in (-1, "x", None):
            with pytest.raises(ValueError, match="image_token_id must be a token"):
                read_config({**config_of(model_type), "image_token_id": placeholder}, media=True)


def test_every_class_with_a_tower_is_tested() -> None:
    towers = {model.__name__ for model in MODEL_LIST.values() if issubclass(model, SeesImages)}
    of_others = {"PaddleOCRVLForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"}  # test_paddleocr_vl.py
    assert len(towers - of_others) == len(MODELS)  # and tests/llm/models/towers/test_omni.py


@pytest.mark.parametrize("kind", [["llama"], {}, 3])
@pytest.mark.parametrize("family", ["Idefics3", "InternVL", "Lfm2Vl", "Llava", "Mistral3"])
def test_a_kind_of_text_that_is_no_name_is_refused(family, kind) -> None:
    config = {"architectures": [f"{family}ForConditionalGeneration"], "text_config": {"model_type": kind}}
    with pytest.raises(NotImplementedError, match=rf"text_config.model_type = .* not implemented for {family}; "):
        read_config(config)


@pytest.mark.parametrize("kind", [["pixtral"], {}, None])
def test_a_kind_of_tower_that_is_no_name_is_refused(kind) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {"model_type": kind}}
    with pytest.raises(NotImplementedError, match=r"vision_config.model_type = .* not implemented for Llava; "):
        read_config(config, media=True)
