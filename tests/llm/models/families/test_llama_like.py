"""Configs of families that are similar to Llama: published configs, and refused fields."""

from __future__ import annotations

import logging

import pytest
import torch

from pace.llm.layers import NoRotary
from pace.llm.models.layer_types import FULL, SLIDING
from pace.llm.models.model_list import read_config
from pace.ops import reference


def config_of(**fields):
    return read_config(fields)[1]


GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}  # fmt: skip
"""The fields of gemma-3-4b-it's config.json, which leaves out fields with default values."""


def test_gemma_3_with_its_defaults_left_out(caplog):
    config = read_config(GEMMA3_4B)[1]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.tie_word_embeddings, config.eos_token_id) == (262208, True, (1, 106))
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (1e6, "linear", 8.0)
    assert (config.local_rope.theta, config.local_rope.kind) == (1e4, "default")
    assert (config.window(4), config.window(5), config.window(33)) == (1024, None, 1024)
    assert config.max_length == 131072 and not caplog.records


HUNYUAN = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "attention_head_dim": 128,
    "cla_share_factor": 2, "eod_token_id": 127967, "head_dim": 128, "hidden_size": 4096, "norm_type": "rms",
    "num_hidden_layers": 32, "use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True, "vocab_size": 128167,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "type": "dynamic"},
}  # fmt: skip


def test_hunyuan_stretches_its_base_once_and_for_all(caplog):
    rope = read_config(HUNYUAN)[1].rope
    assert rope.kind == "default" and rope.theta == pytest.approx(11158839.9251, rel=1e-9)
    assert not caplog.records
    plain = config_of(**{**HUNYUAN, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert plain.rope.kind == "dynamic"


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is ignored"),
        (
            "Qwen3VLForConditionalGeneration",
            {"use_sliding_window": True, "max_window_layers": 0},
            "sliding_window is ignored",
        ),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "use_qk_norm = False is ignored"),
        ("CohereForCausalLM", {"use_parallel_residual": False}, "use_parallel_residual = False is ignored"),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm = True is ignored"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is ignored"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 4}, "num_experts_per_tok = 4 is ignored"),
        ("Olmo3ForCausalLM", {"rope_theta": 1e6}, "rope_theta = 1000000.0 is ignored on layers with a window"),
        ("GemmaForCausalLM", {"hidden_activation": "silu"}, "hidden_activation = 'silu' is ignored"),
        ("Ministral3ForCausalLM", {"layer_types": ["sliding_attention"] * 34}, "is ignored"),
        ("IQuestCoderForCausalLM", {"sliding_window": 8}, "sliding_window = 8 is ignored"),
    ],
)
def test_what_transformers_ignores_is_ignored_with_a_warning(caplog, architecture, fields, named):
    with caplog.at_level(logging.WARNING, "pace"):
        found = config_of(architectures=[architecture], **fields)
    assert len(caplog.records) == 1 and named in caplog.text
    plain = config_of(architectures=[architecture])
    if architecture == "Qwen3VLForConditionalGeneration":
        assert found.window(0) is found.window(35) is None
    elif architecture != "Olmo3ForCausalLM":  # its layers without a window use rope_theta
        assert found == plain


@pytest.mark.parametrize(
    ("architecture", "fields", "error", "message"),
    [
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, NotImplementedError,
         "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 5.0}}, NotImplementedError,
         r"rope_parameters\.rope_theta"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": 5}}, ValueError,
         r"rope_parameters\.full_attention must be an object"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "x"}}}, NotImplementedError,
         "rope_type = 'x'"),
        ("Gemma3ForCausalLM", {"rope_scaling": [1]}, ValueError, "rope_scaling must be an object"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, ValueError, "sliding_window is null"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, ValueError, "sliding_window_pattern must be"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, ValueError, "layer_types must name all 26 layers"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"]}, NotImplementedError, "chunked_attention"),
        ("Gemma5ForCausalLM", {}, NotImplementedError, "Gemma5ForCausalLM"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, ValueError, "a number for each of 36 layers; got 2"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2] * 18}, ValueError, "a list of 0 and 1"),
        ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 36}, ValueError, "use_sliding_window is false"),
        ("GraniteForCausalLM", {"logits_scaling": 0.0}, ValueError, "logits_scaling must be"),
        ("GraniteForCausalLM", {"num_local_experts": 8}, NotImplementedError, "num_local_experts"),
        ("GlmForCausalLM", {"head_dim": 6}, ValueError, "must be even"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, NotImplementedError, "use_cla"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, ValueError,
         r"rope_scaling\.alpha"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "ntk_alpha", "alpha": 2.0}}, NotImplementedError, "ntk_alpha"),
        ("CohereForCausalLM", {"logit_scale": None}, ValueError, "logit_scale must be"),
        ("Cohere2ForCausalLM", {"rotary_pct": 0.5}, NotImplementedError, "rotary_pct"),
        ("Cohere2ForCausalLM", {"order_of_interleaved_layers": "x"}, NotImplementedError,
         "order_of_interleaved_layers"),
        ("MiniCPMForCausalLM", {"num_experts": 8}, NotImplementedError, "num_experts"),
        ("MiniCPMForCausalLM", {"sparse_config": {"block_size": 64}}, NotImplementedError, "sparse_config"),
        ("Olmo2ForCausalLM", {"sliding_window": 8}, NotImplementedError, "sliding_window"),
        ("PhimoeForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, NotImplementedError, "yarn"),
        ("PhimoeForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64,
         "long_factor": [1.0] * 64}}, ValueError, r"rope_scaling\.short_mscale is missing"),
        ("PhimoeForCausalLM", {"num_local_experts": 1}, ValueError, "a row chooses"),
        ("PhimoeForCausalLM", {"router_jitter_noise": -0.1}, ValueError, "router_jitter_noise must be"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_mscale": 1.2}}, NotImplementedError,
         "short_mscale"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLX"}, ValueError, "a string of L and G"),
        ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["sliding_attention"] * 32}, ValueError,
         "sliding_window is null"),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [1e4]}, ValueError, "a number for each of 24 layers; got 1"),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [-1.0] * 24}, ValueError, "layer_rope_theta must be"),
        ("HeliumForCausalLM", {"head_dim": 64}, ValueError, r"must be hidden_size for Helium; got 20 \* 64"),
        ("InternLM3ForCausalLM", {"qkv_bias": True}, NotImplementedError, "qkv_bias other than bias"),
        ("IQuestCoderForCausalLM", {"clip_qkv": 8.0}, NotImplementedError, "clip_qkv"),
        ("IQuestCoderForCausalLM", {"use_sliding_window": True}, NotImplementedError, "use_sliding_window"),
        ("MinistralForCausalLM", {"layer_types": ["full_attention"]}, ValueError, "layer_types must name all 32"),
        ("MinistralForCausalLM", {"layer_types": ["sliding_attention"] * 32, "sliding_window": None}, ValueError,
         "sliding_window is null"),
        ("MixtralForCausalLM", {"layer_types": ["full_attention"] * 32}, NotImplementedError, "layer_types"),
        ("Ministral3ForCausalLM", {"rope_parameters": [1]}, ValueError, "rope_parameters must be an object"),
        ("Ministral3ForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": "x"}}, ValueError,
         r"rope_parameters\.llama_4_scaling_beta must be"),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "mixtral"}}, NotImplementedError,
         "text_config.model_type = 'mixtral'"),
        ("CwmForCausalLM", {"attention_bias": True}, NotImplementedError, "attention_bias"),
        ("Llama4ForCausalLM", {"attention_chunk_size": None}, ValueError, "attention_chunk_size is null"),
        ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 48}, NotImplementedError, "sliding_attention"),
        ("Llama4ForCausalLM", {"layer_types": ["full_attention"]}, ValueError, "layer_types must name all 48 layers"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1, 0]}, ValueError, "a number for each of 48 layers; got 2"),
        ("Llama4ForCausalLM", {"moe_layers": "all"}, ValueError, "moe_layers must be a list"),
        ("Llama4ForCausalLM", {"interleave_moe_layer_step": 0}, ValueError, "interleave_moe_layer_step is 0"),
        ("Llama4ForCausalLM", {"num_local_experts": 0}, ValueError, "a router has 1 to"),
        ("Llama4ForCausalLM", {"attn_temperature_tuning": "yes"}, ValueError, "attn_temperature_tuning must be"),
        ("Llama4ForCausalLM", {"floor_scale": 0}, ValueError, "floor_scale must be"),
        ("Llama4ForCausalLM", {"partial_rotary_factor": 0.5}, NotImplementedError, "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(architecture, fields, error, message):
    with pytest.raises(error, match=message):
        config_of(architectures=[architecture], **fields)


SIZES = {
    "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def rotations_of(architecture, **fields):
    """Returns the table of each layer's rotation, or None for a layer without one."""
    model_class, config = read_config({"architectures": [architecture], **SIZES, **fields})
    model = model_class(config, torch.float32, reference)
    rotaries = [layer.mixer.rotary for layer in model.layers]
    return [None if isinstance(rotary, NoRotary) else rotary.table for rotary in rotaries]


def test_which_layers_rotate_and_how():
    assert rotations_of("LlamaForCausalLM") == [0, 0, 0, 0]
    assert rotations_of("SmolLM3ForCausalLM") == [0, 0, 0, None]
    assert rotations_of("SmolLM3ForCausalLM", no_rope_layers=[0, 0, 1, 1, 0]) == [None, None, 0, 0]
    assert rotations_of("Cohere2ForCausalLM") == [0, 0, 0, None]
    assert rotations_of("Llama4ForCausalLM") == rotations_of("Llama4ForCausalLM", no_rope_layers=[]) == [0, 0, 0, None]
    types = [FULL, SLIDING, SLIDING, FULL]
    for architecture in ("Gemma3ForCausalLM", "Olmo3ForCausalLM"):
        assert rotations_of(architecture, layer_types=types) == [0, 1, 1, 0]


def test_layers_of_exaone_and_granite():
    hybrid = {"architectures": ["Exaone4ForCausalLM"], **SIZES, "num_hidden_layers": 6, "sliding_window": 8}
    for pattern, expected in (("LLG", [0, 0, None, 0, 0, None]), ("L", [0] * 5 + [None]), (2, [0, None] * 3)):
        assert rotations_of("Exaone4ForCausalLM", **hybrid, sliding_window_pattern=pattern) == expected
        config = config_of(**hybrid, sliding_window_pattern=pattern)
        assert [config.window(layer) for layer in range(6)] == [8 if table == 0 else None for table in expected]
    for fields in ({"sliding_window_pattern": 0}, {"sliding_window_pattern": None}, {"layer_types": [FULL] * 6}):
        # No layer has a window, but only those of a model without any rotate.
        assert rotations_of("Exaone4ForCausalLM", **hybrid, **fields) == [None] * 6
        assert rotations_of("Exaone4ForCausalLM", **hybrid | {"sliding_window": None}, **fields) == [0] * 6
    thetas = [0, 5e5, 1e4, 5e5]
    assert rotations_of("GraniteSWAForCausalLM", layer_rope_theta=thetas) == [None, 1, 0, 1]
    assert rotations_of("GraniteSWAForCausalLM", layer_rope_theta=[0] * 4) == [None] * 4
    assert rotations_of("GraniteSWAForCausalLM", rope_theta=3e5) == [0] * 4


def test_a_rotation_that_is_left_out_is_the_published_one():
    plain = {"architectures": ["CwmForCausalLM"]}
    rope = config_of(**plain, rope_theta=5.0).rope
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 1e6, 16.0)
    assert config_of(**plain, rope_scaling={"type": "linear", "factor": 2.0}).rope.theta == 1e6
    config = config_of(architectures=["Ministral3ForCausalLM"], rope_theta=5.0)
    assert (config.rope.kind, config.rope.theta, config.rope.attention_factor) == ("yarn", 1e6, 1.0)
    assert (config.temperature_scale, config.temperature_period) == (0.1, 16384)


def test_the_text_of_mistral_3():
    """It is a Mistral by default, whose queries do not grow and which may have a window."""
    whole = {"architectures": ["Mistral3ForConditionalGeneration"]}
    mistral = config_of(**whole, text_config={"rope_scaling": None})
    assert (mistral.sliding_window, mistral.rms_norm_eps, mistral.rope.kind) == (4096, 1e-6, "default")
    assert mistral.tie_word_embeddings and mistral.temperature_scale == 0.0
    grows = {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    assert config_of(**whole, text_config={"rope_parameters": grows}).temperature_scale == 0.0
    text = {"model_type": "ministral3", "rope_scaling": grows, "tie_word_embeddings": False}
    ministral = config_of(**whole, text_config=text)
    assert (ministral.temperature_scale, ministral.temperature_period, ministral.sliding_window) == (0.1, 64, None)
    assert not ministral.tie_word_embeddings
    assert config_of(**whole, text_config=text, tie_word_embeddings=True).tie_word_embeddings


@pytest.mark.parametrize("model_type", ["exaone", "internlm3", "iquestcoder"])
def test_a_renamed_llama_as_transformers_saves_it(model_type):
    """The class is Llama's, the fields and names of tensors those of the family."""
    saved = read_config({"architectures": ["LlamaForCausalLM"], "model_type": model_type})
    assert saved == read_config({"model_type": model_type}) and saved[0].saved_as == "LlamaForCausalLM"
    with pytest.raises(ValueError, match="contradict each other"):
        read_config({"architectures": ["MistralForCausalLM"], "model_type": model_type})


def test_old_activations_of_gemma_are_approximated():
    gemma = {"architectures": ["GemmaForCausalLM"]}
    assert config_of(**gemma, hidden_act="gelu").hidden_act == config_of(**gemma).hidden_act == "gelu_tanh"
    assert config_of(**gemma, hidden_act="gelu_python").hidden_act == "gelu"


def test_llama_4_as_early_checkpoints_say_it(caplog):
    said = {"attn_temperature_tuning": 4, "for_llm_compressor": False, "no_rope_layers": []}
    with caplog.at_level(logging.WARNING, "pace"):
        assert config_of(architectures=["Llama4ForCausalLM"], **said) == config_of(architectures=["Llama4ForCausalLM"])
    assert not caplog.records
    config = config_of(architectures=["Llama4ForCausalLM"])
    assert [config.window(layer) for layer in range(4)] == [8192, 8192, 8192, None]
    assert config_of(architectures=["Llama4ForCausalLM"], interleave_moe_layer_step=24).moe_layers == (23, 47)


def test_regimes_of_two_rotations_are_told_apart():
    """Prompts share keys and values only if both rotations are the same."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    kinds = {FULL: dynamic, SLIDING: {"rope_type": "default"}}
    model_class, config = read_config(
        {"architectures": ["Olmo3ForCausalLM"], **SIZES, "max_position_embeddings": 16, "rope_parameters": kinds}
    )
    model = model_class(config, torch.float32, reference)
    assert model.rope_regime(3) == model.rope_regime(16) != model.rope_regime(17) != model.rope_regime(18)
