"""The config reader: published configs, the defaults of transformers, and errors that name the field."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from pace.llm.layers.rotary import RopeConfig
from pace.llm.models.model_config import MAX_HEAD_DIM
from pace.llm.models.model_list import read_config
from pace.ops import reference


def config_of(architecture, **fields):
    return read_config({"architectures": [architecture], **fields})[1]


def each_of(table):
    """Returns the cases of a table by architecture, each with its architecture."""
    return [(architecture, *case) for architecture, cases in table.items() for case in cases]


def llama(**fields):
    return config_of("LlamaForCausalLM", **fields)


def test_defaults_of_chatglm_are_those_of_its_code():
    """The defaults of `configuration_chatglm.py` from ChatGLM3 and GLM-4-9B. All these checkpoints set
    `multi_query_attention`."""
    config = config_of("ChatGLMModel", multi_query_attention=True, multi_query_group_num=2)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (65024, 4096, 13696)
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (28, 32, 128)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.add_qkv_bias) == (2048, 1e-5, False)
    assert config.rope == RopeConfig("default", 10000.0, 64, 2048, interleaved=True)
    with pytest.raises(NotImplementedError, match="multi_query_attention = false, also where it is missing"):
        config_of("ChatGLMModel")


def test_gpt_neox_has_names_of_its_own_for_the_rotation():
    expected = config_of("GPTNeoXForCausalLM", rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5})
    assert config_of("GPTNeoXForCausalLM", rotary_pct=0.5, rotary_emb_base=500) == expected
    assert (expected.rope.theta, expected.rope.dim, expected.head_dim) == (500.0, 48, 96)
    with pytest.raises(ValueError, match="contradicts its other spelling"):
        config_of("GPTNeoXForCausalLM", rotary_pct=0.5, partial_rotary_factor=0.25)


def test_starcoder2_rotates_all_of_a_head(caplog):
    config_of("Starcoder2ForCausalLM", norm_type="layer_norm", mlp_type="default")
    assert not caplog.records
    fields = {"partial_rotary_factor": 0.5, "norm_type": "rms"}
    assert config_of("Starcoder2ForCausalLM", **fields).rope.dim == 128
    assert "partial_rotary_factor is ignored" in caplog.text and "norm_type = 'rms' is ignored" in caplog.text
    assert len(caplog.records) == 2
    with pytest.raises(NotImplementedError, match="partial_rotary_factor with rope_type = 'linear'"):
        config_of("Starcoder2ForCausalLM", **fields, rope_scaling={"type": "linear", "factor": 2.0})


def test_stablelm_has_heads_of_one_width():
    with pytest.raises(NotImplementedError, match="head_dim = 64 is not implemented.*= 80"):
        config_of("StableLmForCausalLM", head_dim=64)


QWEN2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000,
    "max_window_layers": 70, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280}, "vocab_size": 151936,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
"""The fields of the published config.json of Qwen2.5-VL-3B-Instruct, which has no text_config."""


def test_the_text_part_of_qwens_that_see(caplog):
    config = read_config(QWEN2_5_VL)[1]
    assert config.rope == RopeConfig("default", 1e6, 128, 128000, 128000) and not caplog.records
    text = {name: value for name, value in QWEN2_5_VL.items() if name not in ("vision_config", "architectures")}
    text = {name: value for name, value in text.items() if "_token_id" not in name} | {"model_type": "qwen2_5_vl_text"}
    nested = {name: value for name, value in QWEN2_5_VL.items() if name not in text or name == "model_type"}
    assert read_config({**nested, "tie_word_embeddings": True, "text_config": text})[1] == config
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "mrope_section": [16, 24, 24]}
    assert read_config({**QWEN2_5_VL, "rope_scaling": yarn})[1].rope.kind == "yarn"
    with pytest.raises(NotImplementedError, match="mrope_section|'mrope'"):
        read_config({**QWEN2_5_VL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vision_config": None})


CHATGLM3 = {
    "model_type": "chatglm", "architectures": ["ChatGLMModel"], "add_bias_linear": False, "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "ffn_hidden_size": 13696, "hidden_dropout": 0.0,
    "fp32_residual_connection": False, "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1e-05,
    "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28,
    "original_rope": True, "padded_vocab_size": 65024, "post_layer_norm": True, "rmsnorm": True, "seq_length": 8192,
    "use_cache": True, "torch_dtype": "float16", "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
    "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
}  # fmt: skip
"""The fields of chatglm3-6b's config.json."""


def test_chatglm3(caplog):
    config = read_config(CHATGLM3)[1]
    assert (config.num_key_value_heads, config.max_length, config.eos_token_id) == (2, 8192, 2)
    assert read_config({**CHATGLM3, "vocab_size": 65024, "num_hidden_layers": 28})[1] == config, "both spellings"
    assert read_config({**CHATGLM3, "rope_ratio": 50})[1].rope.theta == 500000
    assert not caplog.records


@pytest.mark.parametrize(
    ("field", "value"),
    [("rmsnorm", False), ("post_layer_norm", False), ("apply_residual_connection_post_layernorm", True),
     ("pre_seq_len", 128), ("quantization_bit", 4), ("multi_query_attention", False)],
)  # fmt: skip
def test_what_chatglm_is_not_is_refused_by_name(field, value):
    with pytest.raises(NotImplementedError, match=f"config.json: {field} = .* is not implemented"):
        read_config({**CHATGLM3, field: value})


# -- accepted fields ---------------------------------------------------------------------------------------------------


def test_llama_3_1():
    config = llama(
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=131072,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.42.3",
        use_cache=True,
        vocab_size=128256,
    )
    assert config.head_dim == 128 and config.eos_token_id == (128001, 128008, 128009)
    assert config.rope == RopeConfig(
        "llama3", 500000.0, 128, 131072, 8192, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_phi_3_mini_128k_and_its_old_names():
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    base = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
    expected_factor = math.sqrt(1 + math.log(32) / math.log(4096))
    for name in ("su", "longrope", "yarn"):
        config = config_of("Phi3ForCausalLM", **base, rope_scaling={"type": name, **factors})
        assert config.rope.kind == "longrope" and config.rope.original_max_positions == 4096
        assert config.rope.attention_factor == pytest.approx(expected_factor)
        assert config.window(0) == 262144
    # the length before extension defaults to 4096, even if the scaling has another
    del base["original_max_position_embeddings"]
    scaling = {"type": "su", "original_max_position_embeddings": 99, **factors}
    assert config_of("Phi3ForCausalLM", **base, rope_scaling=scaling).rope.original_max_positions == 4096


def test_qwen2_window_needs_its_switch():
    fields = {"sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
    off = config_of("Qwen2ForCausalLM", **fields, use_sliding_window=False)
    on = config_of("Qwen2ForCausalLM", **fields, use_sliding_window=True)
    assert [off.window(i) for i in range(3)] == [None] * 3
    assert [on.window(i) for i in range(3)] == [None, 8, 8]


def test_rope_theta_inside_wins_over_the_top_and_scaling_over_parameters():
    both = llama(rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert both.rope.theta == 7.0
    assert llama(rope_theta=5.0).rope.theta == 5.0
    assert llama(rope_theta=5.0, rope_parameters=None).rope.theta == 5.0
    scaled = llama(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"})
    assert scaled.rope.kind == "linear"


def test_length_before_extension():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert llama(rope_parameters=yarn).rope.original_max_positions == 2048
    assert llama(rope_parameters=yarn | {"original_max_position_embeddings": 512}).rope.original_max_positions == 512
    top = llama(rope_parameters=yarn | {"original_max_position_embeddings": 512}, original_max_position_embeddings=256)
    assert top.rope.original_max_positions == 256


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),  # lmsys/vicuna-7b-v1.5-16k
        ({"type": "linear", "factor": 0.5}, 4096),
        ({"type": "dynamic", "factor": 2.0}, 2**31 - 1),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            16384,
        ),  # recommended by Qwen2.5
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "linear", "factor": 1e6}, 2**31 - 1),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 4096),
    ],
)
def test_how_long_a_text_may_be(scaling, longest):
    model_class, config = read_config(
        {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "rope_scaling": scaling}
    )
    assert model_class(config, torch.float32, reference).max_position_embeddings == longest
    assert config.max_position_embeddings == 4096


def test_the_field_that_limits_a_text_is_named():
    raw = {"architectures": ["DeepseekV32ForCausalLM"], "max_position_embeddings": 4096}
    for topk, expected in ((64, (64, "index_topk")), (8192, (4096, "max_position_embeddings"))):
        config = read_config(raw | {"index_topk": topk})[1]
        assert (config.max_length, config.length_field) == expected


def test_gptj_names_of_both_kinds():
    config = config_of("GPTJForCausalLM", n_embd=64, n_head=4, n_layer=2, n_positions=128, rotary_dim=8)
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers, config.max_position_embeddings) == (
        64,
        16,
        2,
        128,
    )
    assert config.n_inner == 256
    with pytest.raises(ValueError, match="contradicts"):
        config_of("GPTJForCausalLM", n_embd=64, hidden_size=32)


def test_unknown_fields_are_named_in_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="pace"):
        llama(
            strange=1,
            stranger=[2],
            use_cache=True,
            pretraining_tp=8,  # splits products in training; the sums are the same
            _name_or_path="x",
            attention_dropout=0.1,
            rope_scaling={"type": "linear", "factor": 2.0, "odd": 1},
        )
    assert [record.message.split(": ")[-1] for record in caplog.records] == ["strange, stranger", "odd"]


def test_heads_are_as_wide_as_the_kernels_hold():
    assert llama(head_dim=MAX_HEAD_DIM).head_dim == MAX_HEAD_DIM
    with pytest.raises(ValueError, match="head_dim must be an integer in 1..512"):
        llama(head_dim=MAX_HEAD_DIM + 1)


# -- refused fields ----------------------------------------------------------------------------------------------------


WRONG = {
    "LlamaForCausalLM": [({"hidden_size": -1}, "hidden_size"), ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"), ({"hidden_size": 4096.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"), ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": None}, "hidden_size"), ({"hidden_size": [4096]}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"), ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"vocab_size": 10**10}, "vocab_size"), ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"hidden_size": 100}, "hidden_size"), ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_size": 2**20, "num_attention_heads": 1}, "head_dim"), ({"head_dim": 10**5}, "head_dim"),
        ({"head_dim": 7}, "head_dim"), ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"), ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"attention_bias": 1}, "attention_bias"), ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": 3}, "hidden_act"), ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [1, True]}, "eos_token_id"), ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"), ({"rope_scaling": 3}, "rope_scaling"),
        ({"rope_parameters": "default"}, "rope_parameters"), ({"rope_scaling": {"type": 1}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"), ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": True}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "dynamic"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0}},
         "high_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor")],
    "Phi3ForCausalLM": [({"rope_scaling": {"type": "su", "short_factor": ["1"] * 48}}, "short_factor"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"original_max_position_embeddings": 0, "rope_scaling": {"type": "su"}}, "original_max")],
    "MistralForCausalLM": [({"sliding_window": 0}, "sliding_window")],
    "Qwen2ForCausalLM": [({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types")],
    "PhiForCausalLM": [({"hidden_size": 72, "num_attention_heads": 4}, "partial_rotary_factor")],
    "OPTForCausalLM": [({"num_attention_heads": 7}, "num_attention_heads"),
        ({"word_embed_proj_dim": -5}, "word_embed_proj_dim")],
    "GPTJForCausalLM": [({"rotary_dim": 5}, "rotary_dim"), ({"rotary_dim": 512}, "rotary_dim"),
        ({"rotary_dim": None}, "rotary_dim")],
    "DeepseekV2ForCausalLM": [({"qk_rope_head_dim": 5, "num_experts_per_tok": 6}, "qk_rope_head_dim"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"), ({}, "num_experts_per_tok is missing"),
        ({"topk_method": "group_limited_greedy", "num_experts_per_tok": 6}, "n_group and topk_group")],
    "DeepseekV3ForCausalLM": [({"n_group": 7}, "256 experts in 7 groups"), ({"topk_group": 9}, "9 are kept"),
        ({"norm_topk_prob": None}, "norm_topk_prob")],
    "MixtralForCausalLM": [({"num_local_experts": 0}, "num_experts"),
        ({"num_local_experts": 1}, "num_experts = 1 and num_experts_per_tok = 2")],
    "Qwen3MoeForCausalLM": [({"num_experts_per_tok": 129}, "num_experts_per_tok = 129"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"), ({"mlp_only_layers": [-1]}, "mlp_only_layers")],
    "GptOssForCausalLM": [({"layer_types": ["full_attention"]}, "layer_types"), ({"swiglu_limit": 0}, "swiglu_limit")],
    "Glm4MoeLiteForCausalLM": [({"mlp_layer_types": ["dense"]}, "mlp_layer_types")],
}  # fmt: skip


@pytest.mark.parametrize("architecture, fields, named", each_of(WRONG))
def test_wrong_values_are_value_errors_that_name_the_field(architecture, fields, named):
    with pytest.raises(ValueError, match=named):
        config_of(architecture, **fields)


NOT_IMPLEMENTED = {
    "LlamaForCausalLM": [({"hidden_act": "mish"}, "mish"), ({"rope_scaling": {"type": "unheard-of"}}, "unheard-of"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.*aqlm"),
        ({"num_local_experts": 8}, "num_local_experts"), ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"sliding_window": 4096}, "sliding_window"), ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"norm_type": "layer_norm"}, "norm_type"), ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type")],
    "MistralForCausalLM": [({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["chunked_attention"] * 32}, "layer_types")],
    "Qwen2ForCausalLM": [({"layer_types": ["chunked_attention"] * 32}, "chunked_attention")],
    "Phi3ForCausalLM": [({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear")],
    "GPTJForCausalLM": [({"rotary": False}, "rotary"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling")],
    "ChatGLMModel": [({"multi_query_attention": True, "rope_scaling": {"type": "yarn"}}, "rope_scaling")],
    "OPTForCausalLM": [({"sliding_window": 7}, "sliding_window")],
    "GPTNeoXForCausalLM": [({"layer_types": ["sliding_attention"] * 44}, "layer_types")],
    "Qwen3MoeForCausalLM": [({"scoring_func": "sigmoid"}, "scoring_func"), ({"n_group": 4}, "n_group")],
    "MixtralForCausalLM": [({"routed_scaling_factor": 2.5}, "routed_scaling_factor")],
    "DeepseekV2ForCausalLM": [({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"topk_method": "noaux_tc"}, "topk_method")],
    "DeepseekV3ForCausalLM": [({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method")],
    "Glm4MoeForCausalLM": [({"scoring_func": "softmax"}, "scoring_func")],
    "GptOssForCausalLM": [({"hidden_act": "gelu"}, "hidden_act")],
    "HYV3ForCausalLM": [({"mlp_bias": True}, "mlp_bias"), ({"norm_topk_prob": False}, "norm_topk_prob")],
}  # fmt: skip


@pytest.mark.parametrize("architecture, fields, named", each_of(NOT_IMPLEMENTED))
def test_what_is_not_implemented_is_refused_by_name(architecture, fields, named):
    with pytest.raises(NotImplementedError, match=named):
        config_of(architecture, **fields)


@pytest.mark.parametrize(
    "raw",
    [None, [], "x", 3, {}, {"architectures": []}, {"architectures": [3]}, {"architectures": "Llama"},
     {"model_type": 3}],
)  # fmt: skip
def test_not_a_config_at_all(raw):
    with pytest.raises(ValueError, match="config.json"):
        read_config(raw)


def test_the_class_is_found_by_its_usual_names():
    def found(**raw):
        return read_config(raw)[0].__name__

    assert found(architectures=["LLaMAForCausalLM"]) == "LlamaForCausalLM"
    assert found(architectures=["OPTModel"]) == "OPTForCausalLM"
    assert found(architectures=None, model_type="phi3") == "Phi3ForCausalLM"
    assert found(model_type="gptj") == "GPTJForCausalLM"
    with pytest.raises(NotImplementedError, match="LlamaForSequenceClassification"):
        found(architectures=["LlamaForSequenceClassification"], model_type="llama")


def test_architecture_and_model_type_must_agree():
    """transformers uses model_type, so one of the two readings would be another model."""
    with pytest.raises(ValueError, match="LlamaForCausalLM.*qwen2"):
        read_config({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"})
    assert read_config({"architectures": ["LlamaForCausalLM"], "model_type": "Yi"})[0].__name__ == "LlamaForCausalLM"


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(NotImplementedError, match="UnheardForCausalLM.*LlamaForCausalLM"):
        read_config({"architectures": ["UnheardForCausalLM"]})
