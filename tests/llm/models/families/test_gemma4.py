"""The config of Gemma 4: heads and rotations by kind of layer, layers that share keys and values, and what is
refused."""

from __future__ import annotations

import logging

import pytest
import torch

from pace.llm.models.families.gemma4_config import Gemma4Config, Heads
from pace.llm.models.model_list import read_config
from pace.ops import reference
from tests.llm.models.families.gemma4_variants import EXPERTS, FULL, GEMMA4_BASE, KEYS, LARGE, PUBLISHED_GEMMA4, SLIDING
from tests.support import TensorDict, prefill

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4}
TINY = SIZES | GEMMA4_BASE["gemma4_text"]


def read(**fields) -> Gemma4Config:
    return Gemma4Config.from_dict(TINY | fields)


def test_heads_of_the_published_sizes():
    found = {name: read_config(config)[1] for name, config in PUBLISHED_GEMMA4.items()}
    assert {name: (config.heads(0), config.heads(5 if "E2B" not in name else 4)) for name, config in found.items()} == {
        "gemma-4-E2B-it": (Heads(1, 256), Heads(1, 512)),
        "gemma-4-E4B-it": (Heads(2, 256), Heads(2, 512)),
        "gemma-4-12B-it": (Heads(8, 256), Heads(1, 512)),
        "gemma-4-26B-A4B-it": (Heads(8, 256), Heads(2, 512)),
        "gemma-4-31B-it": (Heads(16, 256), Heads(4, 512)),
    }
    e2b = found["gemma-4-E2B-it"]
    assert [e2b.source(layer) for layer in (14, 15, 19, 34)] == [None, 13, 14, 14]
    assert [e2b.inner_size(layer) for layer in (14, 15)] == [6144, 12288]
    assert (e2b.rope.rotated, e2b.rope.dim, e2b.local_rope.dim) == (64, 512, 256)
    assert found["gemma-4-E4B-it"].inner_size(41) == 10240


def test_key_heads_of_all_positions_count_only_where_keys_are_values():
    assert read(num_global_key_value_heads=1).heads(1) == Heads(2, 20)
    assert read(**KEYS).heads(1) == Heads(1, 20)
    assert read(**KEYS, per_layer_config={}).heads(1) == Heads(2, 12)


def test_overrides_of_layers():
    every = {f"{layer:02}": {"head_dim": 16, "num_key_value_heads": 4, "skip": []} for layer in (1, 4, 6)}
    config = read(per_layer_config=every, global_head_dim=44)
    assert (config.heads(0), config.heads(1), config.rope.dim) == (Heads(2, 12), Heads(4, 16), 16)
    with pytest.raises(ValueError, match="per_layer_config must be the same for all layers of full_attention"):
        read(per_layer_config={"1": {"head_dim": 16}})
    with pytest.raises(ValueError, match="has a layer 7, but there are 7"):
        read(per_layer_config={"7": {"head_dim": 16}})
    with pytest.raises(NotImplementedError, match="per_layer_config: intermediate_size of layer 1 is not implemented"):
        read(per_layer_config={"1": {"intermediate_size": 16}})
    for wrong in ([], {"a": {}}, {"1": 3}, {"1": {"head_dim": True}}, {"1": {"head_dim": 0}}):
        with pytest.raises(ValueError, match="per_layer_config must be an object"):
            read(per_layer_config=wrong)


def test_the_last_layer_sees_all_positions(caplog):
    with caplog.at_level(logging.WARNING, "pace"):
        config = read(layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING])
    assert config.layer_types[-1] == FULL and "the last layer is a full_attention layer" in caplog.text


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"num_kv_shared_layers": 7}, ValueError, "num_kv_shared_layers = 7 leaves no layer of full_attention"),
        ({"num_kv_shared_layers": 6}, ValueError, "num_kv_shared_layers = 6 leaves no layer of full_attention"),
        ({"vocab_size_per_layer_input": 98}, ValueError, "vocab_size_per_layer_input must be at least vocab_size"),
        (KEYS | {"num_global_key_value_heads": 3}, ValueError, "must be a multiple of the key heads of full_attention"),
        ({"use_bidirectional_attention": "all"}, NotImplementedError, "use_bidirectional_attention"),
        ({"enable_moe_block": True}, ValueError, "num_experts is missing, but enable_moe_block is true"),
        (EXPERTS | {"top_k_experts": 7}, ValueError, "num_experts and top_k_experts"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}}}, ValueError, "rope_parameters has no rotation for sliding"),
        (
            {"rope_parameters": {kind: {"partial_rotary_factor": 0.5} for kind in (FULL, SLIDING)}},
            NotImplementedError,
            "partial_rotary_factor = 0.5",
        ),
    ],
    ids=str,
)
def test_what_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        read(**fields)


def test_keys_of_layers_that_share_them_are_ignored_in_a_checkpoint():
    model_class, config = read_config({"model_type": "gemma4_text"} | TINY)
    model = model_class(config, torch.float32, reference)
    state = {name: torch.rand(found[0].shape) for name, found in model.targets().items()}
    unused = {f"model.layers.5.self_attn.{name}.weight": torch.rand(24, 32) for name in ("k_proj", "v_proj", "k_norm")}
    model.load_weights(TensorDict(state | unused))
    assert prefill(model, torch.arange(9)).isfinite().all()
    again = model_class(config, torch.float32, reference)
    with pytest.raises(ValueError, match=r"unexpected \(1\): model\.layers\.3\.self_attn\.v_norm\.weight"):
        again.load_weights(TensorDict(state | {"model.layers.3.self_attn.v_norm.weight": torch.rand(12)}))


def test_a_factor_of_a_layer_that_is_no_number_is_refused():
    model_class, config = read_config({"model_type": "gemma4_text"} | TINY)
    model = model_class(config, torch.float32, reference)
    state = {name: torch.rand(found[0].shape) for name, found in model.targets().items()}
    model.load_weights(TensorDict(state | {"model.layers.2.layer_scalar": torch.tensor([torch.nan])}))
    with pytest.raises(ValueError, match=r"the tensor model\.layers\.2\.layer_scalar is nan; it must be finite"):
        prefill(model, torch.arange(9))


def test_the_12b_has_no_embeddings_of_layers(caplog):
    fields = {"model_type": "gemma4_unified_text"} | SIZES | LARGE | {"hidden_size_per_layer_input": 8}
    with caplog.at_level(logging.WARNING, "pace"):
        config = read_config(fields)[1]
    assert config.hidden_size_per_layer_input == 0 and "hidden_size_per_layer_input = 8 is ignored" in caplog.text
