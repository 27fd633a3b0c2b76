"""Slots: what is refused, names, counting, and memory."""

from __future__ import annotations

import gc

import pytest
import torch

from pace.llm.adapters.slots import AdapterSlots
from pace.llm.adapters.weights import AdapterModule, AdapterWeights
from pace.ops import native
from pace.ops.adapters import AdapterMatrices
from tests.llm.models.variants import save_tiny
from tests.support import load_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots")
    save_tiny(folder, "qwen3_moe", {})
    return load_model(folder, torch.bfloat16, native)


def module(n, k, rank=4, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return AdapterModule(
        torch.randn(rank, k, generator=generator), torch.randn(n, rank, generator=generator), None, scale
    )


Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


def adapter(name="a", seed=0, **modules):
    return AdapterWeights(name, {Q: module(48, 32, seed=seed), K: module(24, 32, seed=seed), **modules})


def test_what_does_not_fit_is_refused_in_one_error(model):
    slots = AdapterSlots(model, max_rank=4)
    wrong = {
        "model.layers.0.self_attn.nothing": module(8, 8),
        "model.layers.7.self_attn.q_proj": module(48, 32),
        Q: module(48, 31),
        K: module(24, 32, rank=5),
    }
    with pytest.raises(ValueError) as error:
        slots.load(AdapterWeights("x", wrong))
    for part in ("nothing", "layers.7", "for a matrix [48, 32]", "rank 5, more than max_rank=4"):
        assert part in str(error.value)
    assert slots.num_free == 8 and slots.nbytes == 0 and not slots.tables


@pytest.mark.parametrize(
    "path, n, k",
    [
        ("model.embed_tokens", 99, 32),
        ("model.norm", 32, 1),
        ("model.layers.0.mlp.experts.0.gate_proj", 56, 32),
        ("model.layers.0.input_layernorm", 32, 1),
    ],
)
def test_layers_that_take_no_adapters_are_refused_by_name(model, path, n, k):
    with pytest.raises((NotImplementedError, ValueError), match=path.replace(".", r"\.")):
        AdapterSlots(model).check(AdapterWeights("x", {path: module(n, k)}))


def test_names_of_the_bare_decoder_are_the_same_modules(model):
    slots = AdapterSlots(model)
    bare = AdapterWeights("bare", {Q.removeprefix("model."): module(48, 32)})
    slots.check(bare)
    slots.load(bare)
    assert len(slots.tables) == 1


def test_a_digest_is_that_of_the_contents():
    one = adapter("one")
    assert one.digest == adapter("other name").digest
    scaled = AdapterWeights("a", {Q: module(48, 32, scale=2.0), K: module(24, 32)})
    others = [adapter(seed=1), adapter(x=module(3, 3)), scaled]
    assert len({one.digest, *(other.digest for other in others)}) == 4


def test_loads_are_counted_and_slots_are_reused(model):
    slots = AdapterSlots(model, max_adapters=2)
    first = slots.load(adapter())
    assert slots.load(adapter("again")) == first and slots.num_free == 1
    second = slots.load(adapter(seed=1))
    with pytest.raises(ValueError, match=r"2 adapters are loaded \(max_adapters=2\): a, a; unload"):
        slots.load(adapter(seed=2))
    slots.unload(first)
    assert slots.holds(((first, 1.0),)) and not slots.has_leaving
    slots.unload(first)
    assert not slots.holds(((first, 1.0),)) and slots.has_leaving
    slots.free([((first, 0.5),)])  # in use
    assert slots.num_free == 0 and slots.route(((first, 0.5),)) == [(0, 0.5)]
    assert slots.load(adapter()) == first and slots.holds(((first, 1.0),)), "it comes back"
    slots.unload(first)
    slots.free([((second, 1.0),)])
    assert slots.num_free == 1
    with pytest.raises(KeyError):
        slots.unload(first)
    with pytest.raises(KeyError):
        slots.route(((first, 1.0),))


def test_memory_is_freed(model):
    slots = AdapterSlots(model, max_adapters=1)
    for seed in range(50):
        digest = slots.load(adapter(seed=seed))
        assert 0 < slots.nbytes < 40_000
        slots.unload(digest)
        slots.free(())
        assert slots.nbytes == 0
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, AdapterMatrices)]


def test_values_too_large_for_the_models_dtype_are_refused(tmp_path):
    save_tiny(tmp_path, "llama", {})
    model = load_model(tmp_path, torch.float16, native)
    large = AdapterModule(torch.full((2, 32), 1e6), torch.zeros(32, 2), None, 1.0)
    with pytest.raises(ValueError, match="float16"):
        AdapterSlots(model).load(AdapterWeights("large", {Q: large}))


@pytest.mark.parametrize("limits", [{"max_adapters": 0}, {"max_rank": True}, {"max_rank": 1.5}])
def test_limits_are_checked(model, limits):
    with pytest.raises(ValueError, match="must be an int of 1 or more"):
        AdapterSlots(model, **limits)


def test_matrices_that_do_not_belong_together_are_refused():
    for a, b, bias in (((2, 3), (4, 3), None), ((0, 3), (4, 0), None), ((2, 3), (4, 2), (3,))):
        with pytest.raises(ValueError, match=r"A \[r, "):
            AdapterModule(torch.zeros(a), torch.zeros(b), bias and torch.zeros(bias), 1.0)
