"""The `vision_config` of Gemma 4: published ones, defaults, and what is refused."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from pace.llm.models.model_list import read_config
from pace.llm.models.towers.gemma4_audio import Gemma4AudioConfig, Gemma4AudioTower
from pace.llm.models.towers.gemma4_unified import Gemma4UnifiedVisionConfig
from pace.llm.models.towers.gemma4_vision import Gemma4VisionConfig
from pace.ops import reference
from tests.llm.models.families.gemma4_variants import PUBLISHED_GEMMA4

SMALL = {
    "attention_bias": False, "attention_dropout": 0.0, "default_output_length": 280, "dtype": "bfloat16",
    "global_head_dim": 64, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 131072,
    "model_type": "gemma4_vision", "num_attention_heads": 12, "num_hidden_layers": 16, "num_key_value_heads": 12,
    "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False,
    "use_clipped_linears": True,
}  # fmt: skip
LARGE = SMALL | {
    "global_head_dim": 72, "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "standardize": True, "use_clipped_linears": False,
}  # fmt: skip
UNIFIED = {
    "dtype": "bfloat16", "initializer_range": 0.02, "mm_embed_dim": 3840, "mm_posemb_size": 1120,
    "model_type": "gemma4_unified_vision", "output_proj_dims": 3840, "patch_size": 16, "pooling_kernel_size": 3,
    "rms_norm_eps": 1e-06,
}  # fmt: skip
TOWERS = {
    "gemma-4-E2B-it": (SMALL, "Gemma4VisionTower", 168),
    "gemma-4-E4B-it": (SMALL, "Gemma4VisionTower", 169),
    "gemma-4-12B-it": (UNIFIED, "Gemma4UnifiedTower", 49),
    "gemma-4-26B-A4B-it": (LARGE, "Gemma4VisionTower", 572),
    "gemma-4-31B-it": (LARGE, "Gemma4VisionTower", 575),
}
"""Fields, class, and millions of weights with the table of positions."""


@pytest.mark.parametrize("name", TOWERS)
def test_published_configs(name, caplog) -> None:
    vision, tower, millions = TOWERS[name]
    with caplog.at_level(logging.WARNING, "pace"):
        model_class, config = read_config(PUBLISHED_GEMMA4[name] | {"vision_config": vision}, media=True)
    assert not caplog.records
    assert config.image_token_id == 258880
    assert dict(config.stand_ins) == {258880: 0, 258881: 0, 258884: 0}
    text = dataclasses.replace(config, num_hidden_layers=0, num_kv_shared_layers=0, layer_types=())
    model = model_class(text, torch.float32, reference)
    assert [type(each).__name__ for each in model.towers] == [tower]
    assert model.towers[0].width == config.hidden_size
    assert model.whole_media == (name[8:11] not in ("E2B", "E4B"))
    assert model.sees_beyond_windows == ("12B" in name)
    assert model.towers[0].num_weights // 10**6 == millions


@pytest.mark.parametrize("ours", [Gemma4VisionConfig, Gemma4UnifiedVisionConfig])
def test_fields_that_are_left_out_have_the_defaults_of_transformers(ours) -> None:
    from transformers import AutoConfig

    fields = AutoConfig.for_model(ours.model_types[0]).to_dict()
    assert ours.read(fields) == ours.read({})


@pytest.mark.parametrize(
    ("name", "fields", "error", "message"),
    [
        ("gemma-4-E2B-it", {"patch_size": 0}, ValueError, r"vision_config\.patch_size must be an integer"),
        ("gemma-4-E2B-it", {"head_dim": 66}, ValueError, "head_dim must be a multiple of 4; got 66"),
        ("gemma-4-E2B-it", {"num_key_value_heads": 5}, ValueError, "must be a multiple of num_key_value_heads"),
        ("gemma-4-E2B-it", {"pooling_kernel_size": 1}, ValueError, "pooling_kernel_size must be an integer in 2"),
        ("gemma-4-E2B-it", {"hidden_activation": "mish"}, NotImplementedError, "hidden_activation.*mish"),
        ("gemma-4-E2B-it", {"rope_parameters": {"rope_type": "yarn"}}, NotImplementedError, "implemented: axial"),
        ("gemma-4-E2B-it", {"rope_parameters": 5}, ValueError, "rope_parameters must be an object or null"),
        ("gemma-4-E2B-it", {"model_type": "siglip_vision_model"}, NotImplementedError, "model_type"),
        ("gemma-4-E2B-it", {"num_registers": 4}, NotImplementedError, r"vision_config\.num_registers = 4"),
        ("gemma-4-12B-it", {"output_proj_dims": 20}, ValueError, "output_proj_dims must be mm_embed_dim"),
        ("gemma-4-12B-it", {"hidden_size": 20}, NotImplementedError, r"vision_config\.hidden_size = 20"),
    ],
)
def test_fields_that_are_refused(name, fields, error, message) -> None:
    config = PUBLISHED_GEMMA4[name] | {"vision_config": TOWERS[name][0] | fields}
    with pytest.raises(error, match=f"{message}.*; media=False loads only the text model"):
        read_config(config, media=True)
    assert read_config(config)[1].vision is None


SOUND = {
    "attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0,
    "attention_invalid_logits_value": -1000000000.0, "attention_logit_cap": 50.0, "conv_kernel_size": 5,
    "gradient_clipping": 10000000000.0, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "model_type": "gemma4_audio", "num_attention_heads": 8, "num_hidden_layers": 12, "output_proj_dims": 1536,
    "residual_weight": 0.5, "rms_norm_eps": 1e-06, "subsampling_conv_channels": [128, 32], "use_clipped_linears": True,
}  # fmt: skip


def test_towers_of_sound() -> None:
    small = PUBLISHED_GEMMA4["gemma-4-E2B-it"] | {"vision_config": SMALL}
    audio = read_config(small | {"audio_config": SOUND}, media=True)[1].audio
    assert audio == Gemma4AudioConfig.read({}) and audio.num_bands == 128
    tower = Gemma4AudioTower(audio, 1536, 258881)
    assert tower.num_weights // 10**6 == 307
    for fields, error, message in (
        ({"hidden_size": 1021}, ValueError, "hidden_size must be even, and a multiple of num_attention_heads"),
        ({"subsampling_conv_channels": [128]}, ValueError, "must be a list of two numbers of channels"),
        ({"conv_group_norm": 3}, NotImplementedError, r"audio_config\.conv_group_norm = 3 is not implemented"),
        ({"hidden_act": "mish"}, NotImplementedError, "mish"),
    ):
        with pytest.raises(error, match=f"{message}.*; media=False loads only the text model"):
            read_config(small | {"audio_config": SOUND | fields}, media=True)
    unified = PUBLISHED_GEMMA4["gemma-4-12B-it"] | {"vision_config": UNIFIED, "audio_config": {"audio_embed_dim": 640}}
    assert read_config(unified, media=True)[1].audio.audio_embed_dim == 640
    with pytest.raises(NotImplementedError, match="audio_config.layers = 3"):
        read_config(unified | {"audio_config": {"layers": 3}}, media=True)
