"""Families with ALiBi, clipped queries or xIELU, and others of their time: published configs, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from pace.llm.layers import alibi_slopes
from pace.llm.models.model_list import read_config
from pace.ops import reference
from tests.editing import edit_tensors
from tests.llm.models.variants import config_fields, save_tiny
from tests.support import load_model, prefill

FALCON = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False, "bias": False,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bos_token_id": 11,
    "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
    "num_hidden_layers": 32, "num_kv_heads": 71, "parallel_attn": True, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 65024,
}  # fmt: skip
MPT = {
    "architectures": ["MPTForCausalLM"], "model_type": "mpt", "d_model": 4096, "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
        "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
        "qk_ln": False, "softmax_scale": None,
    },
    "expansion_ratio": 4, "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048,
    "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "use_cache": False, "verbose": 0,
    "vocab_size": 50432, "init_config": {"name": "kaiming_normal_"},
}  # fmt: skip
PUBLISHED = {
    "Apertus-8B-Instruct-2509": {
        "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 68, "hidden_act": "xielu",
        "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 21504,
        "max_position_embeddings": 65536, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pad_token_id": 3, "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 12000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 131072,
    },
    "bloom-560m": {
        "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
        "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024,
        "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "use_cache": False, "vocab_size": 250880,
        "slow_but_exact": False, "seq_length": 2048,
    },
    "codegen-350M-mono": {
        "activation_function": "gelu_new", "architectures": ["CodeGenForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "codegen", "n_ctx": 2048,
        "n_embd": 1024, "n_head": 16, "n_inner": None, "n_layer": 20, "n_positions": 2048, "resid_pdrop": 0.0,
        "rotary_dim": 32, "scale_attn_weights": True, "summary_activation": None, "tie_word_embeddings": False,
        "tokenizer_class": "GPT2Tokenizer", "use_cache": True, "vocab_size": 51200,
    },
    "falcon-7b": FALCON,
    "falcon-40b": FALCON | {
        "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60,
        "num_kv_heads": 8,
    },
    "falcon-11B": FALCON | {
        "activation": "gelu", "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_size": 4096,
        "max_position_embeddings": 8192,
        "new_decoder_architecture": True, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8,
        "num_ln_in_parallel_attn": 1, "rope_scaling": None, "rope_theta": 5000042.0, "tie_word_embeddings": False,
    },
    "falcon-rw-1b": FALCON | {
        "alibi": True, "bias": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2048, "multi_query": False,
        "num_attention_heads": 32, "num_hidden_layers": 24, "num_kv_heads": 32, "parallel_attn": False,
        "vocab_size": 50304,
    },
    "starcoderbase-1b": {
        "activation_function": "gelu_pytorch_tanh", "architectures": ["GPTBigCodeForCausalLM"],
        "attention_softmax_in_fp32": True, "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1,
        "eos_token_id": 0, "inference_runner": 0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "max_batch_size": None, "max_sequence_length": None, "model_type": "gpt_bigcode", "multi_query": True,
        "n_embd": 2048, "n_head": 16, "n_inner": 8192, "n_layer": 24, "n_positions": 8192, "pad_key_length": True,
        "pre_allocate_kv_cache": False, "resid_pdrop": 0.1, "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True, "summary_activation": None, "torch_dtype": "float32", "use_cache": True,
        "validate_runner_input": True, "vocab_size": 49152,
    },
    "mpt-7b": MPT,
    "mpt-7b-storywriter": MPT | {
        "attn_config": MPT["attn_config"] | {"alibi_bias_max": 16, "clip_qkv": 6, "attn_impl": "triton"},
        "max_seq_len": 65536,
    },
    "OLMo-1.7-7B-hf": {
        "architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": 8.0,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 1,
        "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 50304,
    },
}  # fmt: skip
IGNORED = {
    "Apertus-8B-Instruct-2509": ["post_norm, qk_norm"],
    "falcon-11B": ["ff_factor"],
    "mpt-7b": ["tokenizer_name"],
    "mpt-7b-storywriter": ["tokenizer_name"],
}
"""Fields that a warning names, by checkpoint."""


def config_of(model_type, **fields):
    return read_config({"model_type": model_type, **config_fields(model_type, fields)})[1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_makes_a_model(name, caplog):
    model_class, config = read_config(PUBLISHED[name])
    model = model_class(config, torch.bfloat16, reference)
    assert len(model.layers) == config.num_hidden_layers
    assert [record.message.split(": ")[-1] for record in caplog.records] == IGNORED.get(name, [])


def test_what_published_configs_say():
    models = {name: read_config(raw) for name, raw in PUBLISHED.items()}
    layers = {name: kind(config, torch.bfloat16, reference).layers[0] for name, (kind, config) in models.items()}
    heads = {name: layer.mixer.cache.kv_heads for name, layer in layers.items()}
    assert [heads[f"falcon-{name}"] for name in ("7b", "40b", "11B", "rw-1b")] == [1, 8, 8, 32]
    assert [layers[f"falcon-{name}"].mlp_norm is None for name in ("7b", "40b", "11B", "rw-1b")] == [1, 0, 1, 0]
    assert layers["falcon-rw-1b"].mixer.bf16_bias and not layers["falcon-rw-1b"].parallel
    story, plain = layers["mpt-7b-storywriter"].mixer, layers["mpt-7b"].mixer
    assert torch.equal(story.slopes, alibi_slopes(32, 16.0)) and torch.equal(plain.slopes, alibi_slopes(32))
    assert (story.clip.high, plain.clip, layers["OLMo-1.7-7B-hf"].mixer.clip.high) == (6.0, None, 8.0)


@pytest.mark.parametrize(("model_type", "fields", "error", "message"), [
    ("apertus", {"xielu": [[1.0, 1.0, 0.5, -1e-6]]}, ValueError, "xielu must have numbers for 2 layers; got 1"),
    ("apertus", {"hidden_act": "mish"}, NotImplementedError, "the activation 'mish' is not implemented"),
    ("apertus1p5_text", {"output_vocab_size": 100}, ValueError, "output_vocab_size must be at most vocab_size = 99"),
    ("apertus1p5_text", {"output_vocab_size": 50, "tie_word_embeddings": True}, NotImplementedError, "output_vocab"),
    ("codegen", {"n_embd": 30, "hidden_size": 30, "num_attention_heads": 3}, ValueError, "a multiple of 4; got 30"),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, ValueError, "parallel_attn must be true"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, ValueError, "needs new_decoder_architecture = true"),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, ValueError, "a multiple of num_kv_heads"),
    ("gpt_bigcode", {"scale_attn_by_inverse_layer_idx": True}, NotImplementedError, "inverse_layer_idx"),
    ("mpt", {"attn_config": {"alibi": False}}, NotImplementedError, "alibi = False is not implemented"),
    ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, NotImplementedError, "attn_type"),
    ("mpt", {"attn_config": {"qk_ln": True}}, NotImplementedError, "qk_ln = True"),
    ("mpt", {"attn_config": [1]}, ValueError, "attn_config must be an object or null"),
    ("mpt", {"no_bias": False}, NotImplementedError, "no_bias = False"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, NotImplementedError, "logit_scale"),
    ("olmo", {"clip_qkv": -1.0}, ValueError, "clip_qkv must be a number in 0.."),
])  # fmt: skip
def test_refusals_name_the_field(model_type, fields, error, message):
    with pytest.raises(error, match=message):
        config_of(model_type, **fields)


def test_fields_without_effect(caplog):
    with caplog.at_level(logging.WARNING, "pace"):
        assert config_of("bloom", n_inner=7) == config_of("bloom")
        assert config_of("falcon", apply_residual_connection_post_layernorm=True) == config_of("falcon")
    assert "n_inner = 7 is ignored" in caplog.text and "post_layernorm = True is ignored" in caplog.text


def test_numbers_of_xielu_may_be_vectors_of_one_element(tmp_path):
    """The first checkpoints of Apertus have such vectors."""
    pytest.importorskip("transformers")
    save_tiny(tmp_path, "apertus", {})
    ids = torch.arange(2, 40)
    expected = prefill(load_model(tmp_path, torch.float32, reference), ids)
    with edit_tensors(tmp_path) as state:
        assert [name for name in state if ".act_fn." in name and state[name].ndim == 0]
        state |= {name: tensor.reshape(tensor.shape or 1) for name, tensor in state.items()}
    assert torch.equal(prefill(load_model(tmp_path, torch.float32, reference), ids), expected)
