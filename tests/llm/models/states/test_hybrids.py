"""Configs and checkpoints of LFM2, Qwen3-Next, Qwen3.5 and OLMo-Hybrid: every spelling, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from pace.batch import Positions
from pace.llm import LLMModel, PromptLookupConfig, SamplingConfig
from pace.llm.layers import MixtureOfExperts
from pace.llm.models.model_list import read_config
from pace.ops import reference
from pace.ops.experts import Router
from pace.states import State
from tests.llm.models.states.hybrid_variants import HYBRID_BASE
from tests.llm.models.states.published_hybrids import HYBRIDS
from tests.llm.models.states.published_mamba import MAMBAS
from tests.llm.models.variants import config_fields, save_tiny
from tests.support import TensorDict, prefill

IDS = torch.arange(3, 20)


def config_of(model_type: str, **fields):
    return read_config({"model_type": model_type, **config_fields(model_type, fields)})[1]


def logits(folder, state):
    model_class, config = read_config(json.loads((folder / "config.json").read_text()))
    model = model_class(config, torch.float32, reference)
    model.load_weights(TensorDict(state))
    return prefill(model, IDS)


# -- configs

PUBLISHED = HYBRIDS | MAMBAS


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_makes_a_model_without_warnings(name, caplog):
    model_class, config = read_config(PUBLISHED[name])
    model = model_class(config, torch.bfloat16, reference)
    assert len(model.layers) == config.num_hidden_layers
    assert caplog.records == []


def test_layers_of_the_published_models():
    kinds = {}
    for name, raw in PUBLISHED.items():
        model_class, config = read_config(raw)
        model = model_class(config, torch.bfloat16, reference)
        caches = model.kv_spec.layers
        mixtures = sum(isinstance(layer.mlp, MixtureOfExperts) for layer in model.layers)
        kinds[name] = *(sum(isinstance(cache, kind) for cache in caches) for kind in (State, Positions)), mixtures
    assert kinds == {
        "LFM2-1.2B": (10, 6, 0), "LFM2-8B-A1B": (18, 6, 22), "Qwen3-Next-80B-A3B-Instruct": (36, 12, 48),
        "Qwen3.5-27B": (48, 16, 0), "Qwen3.8-27B": (48, 16, 0), "Qwen3.5-35B-A3B": (30, 10, 40),
        "Olmo-Hybrid-7B": (24, 8, 0),
        "granite-4.0-h-350m": (28, 4, 0), "granite-4.0-h-tiny": (36, 4, 40),
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (23, 6, 23), "Nemotron-H-8B-Base-8K": (24, 4, 0),
        "Bamba-9B-v2": (29, 3, 0), "Mamba-Codestral-7B-v0.1": (64, 0, 0), "Falcon-H1-0.5B-Instruct": (36, 36, 0),
    }  # fmt: skip


def test_sizes_of_the_published_models():
    def config(name):
        return read_config(HYBRIDS[name])[1]

    assert config("LFM2-1.2B").intermediate_size == 8192  # two thirds of 12288
    assert config("LFM2-8B-A1B").router == Router(32, 4, "sigmoid", normalise=True, eps=1e-6)
    assert config("Qwen3-Next-80B-A3B-Instruct").router == Router(512, 10, normalise=True)
    dense = config("Qwen3.5-27B")
    assert (dense.rope.dim, dense.rope.theta, dense.keys_width, dense.values_width) == (64, 1e7, 2048, 6144)
    assert config("Olmo-Hybrid-7B").ropes == ()


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ("qwen3_5_moe_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act"),
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act"),  # also that of the convolutions
        ("bailing_hybrid", {"hidden_act": "relu"}, "hidden_act"),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "sliding_attention"]}, "'sliding_attention'"),
        ("qwen3_next", {"linear_num_key_heads": 4}, "linear_num_value_heads must be a multiple"),
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types must name all 2 layers"),
        ("qwen3_5_text", {"num_experts": 4}, "num_experts"),
        ("lfm2_moe", {"layer_types": None}, "layer_types must name the kind of each layer"),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu"),
        ("lfm2", {"theta": 10000.0}, "theta"),
        ("lfm2", {"block_ffn_dim_multiplier": None}, "block_ffn_dim_multiplier must be a number"),
        ("lfm2", {"tie_embedding": False, "tie_word_embeddings": True}, "contradicts its other spelling"),
        ("olmo_hybrid", {"linear_use_gate": False}, "linear_use_gate"),
        ("olmo_hybrid", {"linear_num_key_heads": None}, "linear_num_value_heads must be a multiple"),
    ],
    ids=str,
)
def test_what_is_refused_by_name(model_type, fields, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        config_of(model_type, **fields)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_spellings_of_qwen(model_type):
    expected = config_of(model_type)
    assert expected.rope.dim == 6  # a quarter of 24
    assert config_of(model_type, layer_types=None, full_attention_interval=2) == config_of(
        model_type, full_attention_interval=2
    )
    half = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    assert config_of(model_type, partial_rotary_factor=0.5, rope_theta=10000.0) == config_of(model_type, **half)
    assert config_of(model_type, **half).rope.dim == 12


def test_text_within_a_config_with_images():
    text = config_fields("qwen3_5_text", {"model_type": "qwen3_5_text", "tie_word_embeddings": True})
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    assert not read_config(whole)[1].tie_word_embeddings
    assert read_config(whole | {"tie_word_embeddings": True})[1] == config_of("qwen3_5_text", tie_word_embeddings=True)


# -- checkpoints


@pytest.fixture
def saved(tmp_path):
    def save(model_type, fields):
        save_tiny(tmp_path, model_type, fields)
        state = load_file(tmp_path / "model.safetensors")
        return state, logits(tmp_path, state)

    return save


EXPERTS = {
    "lfm2_moe": ("feed_forward", {}, ("w1", "w3", "w2")),
    "qwen3_next": ("mlp", {}, ("gate_proj", "up_proj", "down_proj")),
    "qwen3_5_moe_text": ("mlp", {}, ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_in_one_tensor_are_those_of_a_tensor_each(model_type, saved, tmp_path):
    mlp, fields, names = EXPERTS[model_type]
    state, expected = saved(model_type, fields)
    for layer in range(3):
        prefix = f"model.layers.{layer}.{mlp}.experts"
        if f"{prefix}.0.{names[0]}.weight" in state:
            parts = [torch.stack([state.pop(f"{prefix}.{e}.{name}.weight") for e in range(8)]) for name in names]
            state |= {f"{prefix}.gate_up_proj": torch.cat(parts[:2], 1), f"{prefix}.down_proj": parts[2]}
    assert not any("experts.0." in name for name in state)
    assert torch.equal(logits(tmp_path, state), expected)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_what_predicts_further_tokens_is_left_out(model_type, saved, tmp_path):
    state, expected = saved(model_type, {})
    assert torch.equal(logits(tmp_path, state | {"mtp.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}), expected)
    with pytest.raises(ValueError, match=r"unexpected \(1\): .*linear_attn.other"):
        logits(tmp_path, state | {"model.layers.0.linear_attn.other": torch.zeros(2)})


def test_decays_may_be_wider_than_the_file(saved, tmp_path):
    """Published files of bfloat16 have A_log in float32."""
    state, _ = saved("qwen3_5_text", {})
    name = "model.layers.0.linear_attn.A_log"
    wide = state[name] + 1e-4
    narrow = {name: tensor.bfloat16() for name, tensor in state.items()}
    found = logits(tmp_path, narrow | {name: wide})
    assert not torch.equal(found, logits(tmp_path, narrow | {name: wide.bfloat16()}))
    assert torch.equal(found, logits(tmp_path, state | {name: wide}))


def test_convolutions_of_olmo_as_published(saved, tmp_path):
    """transformers saves the channels of all heads in three equal parts, and its old names of norms."""
    state, expected = saved("olmo_hybrid", {})
    name, widths = "model.layers.0.linear_attn.{}_conv1d.weight", (32, 32, 120)
    saved_parts = [state[name.format(part)] for part in "qkv"]
    assert [len(part) for part in saved_parts] != list(widths)
    whole = torch.cat(saved_parts).split(widths)
    state |= {name.format(part): tensor.contiguous() for part, tensor in zip("qkv", whole)}
    assert torch.equal(logits(tmp_path, state), expected)
    old = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    for here, other in old.items():
        state = {full_name.replace(here, other): tensor for full_name, tensor in state.items()}
    assert torch.equal(logits(tmp_path, state), expected)


@pytest.mark.parametrize("model_type", [name for name in HYBRID_BASE if "qwen" in name])
def test_decays_stay_floats(model_type):
    """A QuantizationConfig quantises neither steps nor beta."""
    model_class, config = read_config({"model_type": model_type, **config_fields(model_type, {})})
    model = model_class(config, torch.float32, reference)
    kept = {part for matrix in model.layers[0].mixer.matrices() if matrix.keeps_floats for part in matrix.parts}
    assert kept == {f"model.layers.0.linear_attn.in_proj_{part}" for part in "ba"}


# -- the engine


@pytest.mark.parametrize("model_type", HYBRID_BASE)
def test_tokens_alone_in_a_batch_after_a_prefix_and_with_drafts(model_type, tmp_path):
    save_tiny(tmp_path, model_type, {})
    random = torch.randint(2, 99, (41,), generator=torch.Generator().manual_seed(7)).tolist()
    prompts = [random[:7], random[:30], random]
    limits = SamplingConfig(max_new_tokens=20, ignore_eos=True)

    def generate(model, prompts):
        return [list(tokens) for tokens in model.generate(prompts, limits).generated_token_ids]

    with LLMModel(tmp_path, dtype="float32", progress=False, prefix_cache_bytes=0) as model:
        alone = [generate(model, [prompt])[0] for prompt in prompts]
        assert generate(model, prompts) == alone
    with LLMModel(tmp_path, dtype="float32", progress=False, spec_config=PromptLookupConfig()) as model:
        for _ in range(2):  # the second time after prefixes
            assert generate(model, prompts) == alone


def test_a_session_of_convolutions_that_keep_nothing(tmp_path):
    """A convolution of one position has a state of no elements."""
    save_tiny(tmp_path, "lfm2", {"conv_L_cache": 1})
    with LLMModel(tmp_path, dtype="float32", progress=False) as model:
        with model.session() as session:
            session.append(IDS)
            session.save(tmp_path / "a.session")
            expected = session.append(IDS)
        with model.load_session(tmp_path / "a.session") as session:
            assert torch.equal(session.append(IDS), expected)
