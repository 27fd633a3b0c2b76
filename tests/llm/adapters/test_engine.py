"""Adapters in the engine: mixed steps, the prefix cache, unloading while sequences use them."""

from __future__ import annotations

import pytest
import torch

from pace.llm.engine.engine import Engine
from pace.llm.runners.program import ProgramRunner
from pace.llm.sampling.sampler import Sampling
from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import StoppingCriteria
from pace.ops import native
from tests.llm.models.variants import save_tiny
from tests.support import load_model

pytest.importorskip("peft")
from tests.llm.adapters.random_adapters import random_adapter

MODELS = [("qwen3", {}), ("gemma2", {}), ("qwen3_next", {})]


@pytest.fixture(scope="module", params=MODELS, ids=lambda case: case[0])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    base = save_tiny(folder, *request.param)
    weights = [random_adapter(base, seed)[1] for seed in (1, 2, 3)]
    return load_model(folder, torch.bfloat16, native), weights


def make_engine(loaded, **options):
    model, weights = loaded
    engine = Engine.create(ProgramRunner(model), native, 8 << 20, cache_options=options)
    return engine, [((engine.model.adapters.load(each), 1.0),) for each in weights[:2]]


def make(tokens, adapter=(), length=60):
    sequence = Sequence(tokens, Sampling(num_logprobs=0), StoppingCriteria(length, []), length)
    sequence.adapter = adapter
    return sequence


def run(engine, sequences):
    """Returns the generated tokens of each sequence, and their log-probabilities, which show the bits of logits."""
    engine.submit(sequences)
    while engine.step():
        pass
    return [read(sequence) for sequence in sequences]


def read(sequence):
    return tuple(sequence.generated), tuple(token.logprob for token in sequence.logprobs)


def prompts(count=4):
    return torch.randint(2, 99, (count, 40), generator=torch.Generator().manual_seed(9)).tolist()


def test_a_text_is_the_same_alone_and_among_others(loaded):
    engine, keys = make_engine(loaded)
    cases = [(prompt, key) for prompt in prompts() for key in ((), *keys, (*sorted(keys[0] + keys[1]),))]
    alone = [run(engine, [make(*case)])[0] for case in cases]
    assert run(engine, [make(*case) for case in cases]) == alone
    assert len(set(alone)) == len(cases), "adapters say different things"
    engine.check_idle()


def test_the_prefix_cache_keeps_adapters_apart(loaded):
    fresh, keys = make_engine(loaded)
    cached, same = make_engine(loaded, prefix_cache_bytes=4 << 20)
    assert keys == same, "keys are digests of contents"
    for key in ((), *keys, ((keys[0][0][0], 0.5),)):
        for is_known in (False, True):
            sequence = make(prompts()[0], key)
            assert run(cached, [sequence]) == run(fresh, [make(prompts()[0], key)])
            assert (sequence.stats.num_reused > 0) == is_known, key
    cached.check_idle()


def test_a_fork_and_an_unloaded_adapter_keep_what_they_began_with(loaded):
    engine, keys = make_engine(loaded)
    digest = keys[0][0][0]
    expected = run(engine, [make(prompts()[0], keys[0])])[0]
    sequence = make(prompts()[0], keys[0])
    engine.submit([sequence])
    engine.step()
    engine.unload_adapter(digest)
    assert engine.model.adapters.num_free == 6, "it is in use"
    refused = make(prompts()[1], keys[0])
    engine.submit([refused])
    assert refused.finish_reason == "error" and "was unloaded" in str(refused.error)
    while engine.step():
        pass
    assert read(sequence) == expected
    assert engine.model.adapters.num_free == 7
    assert engine.model.adapters.load(loaded[1][0]) == digest
    sequence = make(prompts()[0], keys[0])
    engine.submit([sequence])
    engine.unload_adapter(digest)
    engine.abort([sequence])
    assert engine.model.adapters.num_free == 7


def test_forks_inherit_adapters(loaded):
    engine, keys = make_engine(loaded)
    source, target = make(prompts()[0], keys[0]), make(prompts()[0])
    engine.submit([source])
    engine.step()
    engine.cache.fork(source, target, 16)
    assert target.adapter == keys[0]
    engine.abort([source])
    engine.cache.free(target)


def test_another_adapter_in_the_same_slot_is_not_taken_for_the_old_one(loaded):
    engine, keys = make_engine(loaded, prefix_cache_bytes=4 << 20)
    fresh, _ = make_engine(loaded)
    run(engine, [make(prompts()[0], keys[0])])
    engine.unload_adapter(keys[0][0][0])
    third = ((engine.model.adapters.load(loaded[1][2]), 1.0),)
    fresh.model.adapters.load(loaded[1][2])
    assert engine.model.adapters.route(third) == [(0, 1.0)]
    sequence = make(prompts()[0], third)
    assert run(engine, [sequence]) == run(fresh, [make(prompts()[0], third)])
    assert sequence.stats.num_reused == 0
