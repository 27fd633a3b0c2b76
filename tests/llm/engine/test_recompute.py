"""A text that grows to the length at which Phi-3 changes its angles is recomputed once from its start, as in
transformers."""

from __future__ import annotations

import pytest
import torch

from pace.llm.cache.manager import CacheManager
from pace.llm.clients.session import Session
from pace.llm.configs import SamplingConfig
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.engine.scheduler import Scheduler
from pace.llm.generator import Generator
from pace.ops import reference
from tests.llm.fake_model import FakeModel, greedy
from tests.llm.generators import check_idle
from tests.llm.models.variants import VARIANTS, save_tiny
from tests.support import load_model

LENGTH = 20


def spans_of(prompt_length, num_tokens, chunk=512, blocks=64):
    """Returns (first position, number of tokens, rope length) of every span of one generation, and the generated
    tokens."""
    model = FakeModel()
    model.recompute_length = LENGTH
    seen = []
    model.hook = lambda batch: seen.append(
        (
            int(batch.positions[0]),
            len(batch.positions),
            int((batch.rope_lengths - batch.positions - 1).max() + batch.positions[0] + 1),
        )
    )
    cache = CacheManager(model.kv_spec, blocks * model.kv_spec.block_bytes)
    engine = Engine(model, reference, cache, Scheduler(cache, max_tokens_per_step=chunk))
    prompt = list(range(1, prompt_length + 1))
    generator = Generator(engine)
    out = generator.generate(prompt, SamplingConfig(max_new_tokens=num_tokens, do_sample=False))
    assert out.generated_token_ids[0] == greedy(model, prompt, num_tokens)
    check_idle(generator)
    return seen


def test_a_growing_text_is_computed_again_once():
    spans = spans_of(17, 6)
    assert spans == [(0, 17, 17), (17, 1, 18), (18, 1, 19), (0, 20, 20), (20, 1, 21), (21, 1, 22)]


def test_in_chunks_too():
    assert spans_of(19, 3, chunk=16) == [(0, 16, 19), (16, 3, 19), (0, 16, 20), (16, 4, 20), (20, 1, 21)]


def test_a_prompt_of_that_length_is_computed_once():
    assert spans_of(20, 2) == [(0, 20, 20), (20, 1, 21)]
    assert spans_of(25, 2) == [(0, 25, 25), (25, 1, 26)]


def test_a_text_that_ends_there_is_not():
    assert spans_of(18, 2) == [(0, 18, 18), (18, 1, 19)]


def test_a_session_keeps_what_it_has():
    model = FakeModel()
    model.recompute_length = LENGTH
    cache = CacheManager(model.kv_spec, 64 * model.kv_spec.block_bytes)
    with Session(EngineDriver(Engine(model, reference, cache, Scheduler(cache)))) as session:
        session.append(list(range(1, 18)))
        calls = model.num_calls
        for token in range(5):
            session.append([token])
        assert model.num_calls == calls + 5


@pytest.mark.parametrize(
    ("model_type", "special"),
    [("phi3", "longrope-long"), ("phi3", "phi-4-mini"), ("llama", "longrope-long"), ("llama", "dynamic-beyond")],
)
def test_greedy_text_across_the_switch_is_that_of_transformers(tmp_path, model_type, special):
    fields = next(fields for name, what, fields in VARIANTS if (name, what) == (model_type, special))
    theirs = save_tiny(tmp_path, model_type, fields)
    ours = load_model(tmp_path, torch.float32, reference)
    cache = CacheManager(ours.kv_spec, 64 * ours.kv_spec.block_bytes)
    generator = Generator(Engine(ours, reference, cache, Scheduler(cache)))
    prompt = [5, 17, 33, 2, 71, 9, 28, 60, 11, 3]
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    out = generator.generate(prompt, SamplingConfig(max_new_tokens=30, do_sample=False, ignore_eos=True))
    assert out.generated_token_ids[0] == expected[0, len(prompt) :].tolist()
