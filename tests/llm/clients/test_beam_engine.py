"""Beams in the engine. Their texts do not depend on the batch, the cache or interruptions, and beams share blocks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import CodeType

import numpy as np
import pytest
import torch

from pace.llm import SamplingConfig
from pace.llm.cache.block_pool import BlockPool
from pace.llm.clients.beam_search import BeamSearch
from pace.llm.clients.session import Session
from tests.llm.clients.beams import BEAMS, make_generator, rows_found, rows_of, searches_of
from tests.llm.engine.test_engine import Listener
from tests.llm.fake_model import FakeModel, greedy
from tests.llm.generation.loaded import BACKENDS, load
from tests.llm.generators import ByHand, by_hand, check_idle, random_prompts
from tests.plugins.tiers import sample
from tests.support import raises_before_line

# -- effects of the engine ---------------------------------------------------------------------------------------------


def test_a_ragged_batch_gives_what_each_prompt_gives_alone() -> None:
    prompts = random_prompts(1, 9)
    alone = [row for prompt in prompts for row in rows_of(make_generator().generate(prompt, BEAMS))]
    for num_tokens, num_sequences in [(512, 64), (1, 64), (5, 3), (512, 8)]:
        generator = make_generator(max_tokens_per_step=num_tokens, max_sequences_per_step=num_sequences)
        assert rows_of(generator.generate(prompts, BEAMS)) == alone, (num_tokens, num_sequences)
        check_idle(generator)
        assert not generator.engine.between_steps


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_are_bit_identical_on_the_kernels(checkpoint, backend: str) -> None:
    model = load(checkpoint("qwen2")[0], backend)
    prompts = [list(range(2, 2 + length)) for length in (1, 17, 40)]
    config = SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=12)
    together = rows_of(model.generate(prompts, config))
    alone = [row for prompt in prompts for row in rows_of(model.generate(prompt, config))]
    assert [row[0] for row in together] == [row[0] for row in alone]
    if backend == "native":
        assert together == alone


CACHES = {
    "paged": {},
    "prefix": {"prefix_cache_bytes": 1 << 13},
    "bmc": {"kv_cache_type": "bmc", "bmc_rows": 8},
    "dynamic": {"kv_cache_type": "dynamic"},
}


SMALL = [(num_blocks, kind) for num_blocks in (6, 7, 9, 14, 25, 200) for kind in CACHES]
FOUR = SamplingConfig(num_beams=4, num_return_sequences=4, max_new_tokens=34, ignore_eos=True)


@functools.cache
def undisturbed(num_blocks: int) -> list[tuple]:
    return rows_of(make_generator().generate(random_prompts(num_blocks, 3, longest=50), FOUR))


@pytest.mark.parametrize("case", sample(SMALL, lambda case: case in SMALL[::5]), ids=str)
def test_a_cache_of_any_kind_too_small_for_all_changes_nothing(case: tuple[int, str]) -> None:
    num_blocks, options = case[0], CACHES[case[1]]
    prompts, config, expected = random_prompts(num_blocks, 3, longest=50), FOUR, undisturbed(num_blocks)
    generator = make_generator(num_blocks, max_tokens_per_step=24, cache_options=options)
    check = generator.engine.cache.check_integrity
    generator.engine.model.hook = lambda batch: check(generator.engine.scheduler.sequences())
    out = generator.generate(prompts, config)
    assert rows_of(out) == expected and (out.metrics.num_preemptions > 0 or num_blocks > 9)
    check_idle(generator)


@pytest.fixture
def copies(monkeypatch) -> list[tuple]:
    """Returns a list that collects the copied blocks."""
    found, copy = [], BlockPool.copy
    monkeypatch.setattr(BlockPool, "copy", lambda self, *blocks: found.append(blocks) or copy(self, *blocks))
    return found


def test_beams_share_blocks(copies) -> None:
    """Ten beams of a prompt of 10 blocks hold these once. Only blocks that several beams would write are copied."""
    generator, used = make_generator(model=FakeModel(eos_bias=-50.0)), []
    cache, model = generator.engine.cache, generator.engine.model
    model.hook = lambda batch: used.append(cache.num_blocks - cache.num_free_blocks)
    generator.generate((list(range(1, 50)) * 4)[:160], SamplingConfig(num_beams=10, max_new_tokens=14))
    assert max(used) <= 10 + 10, "10 of the prompt, one of its own for each beam"
    assert len(copies) <= 9 * 13, "never more than one for each fork"
    assert model.num_calls == 14, "a step for the prompt, and one for all beams together each token"


def test_a_beam_that_goes_on_alone_copies_nothing(copies) -> None:
    model = FakeModel()
    table, one_hot = model.logits_of, 60 * torch.eye(50) - 30
    model.logits_of = lambda tokens: table(tokens) if len(tokens) == 20 else one_hot[tokens[-1]].clone()
    config = SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=30, ignore_eos=True)
    out = make_generator(model=model).generate(list(range(1, 21)), config)
    assert all(len(set(tokens)) == 1 for tokens in out.generated_token_ids)
    assert len(copies) == 2, "when three beams leave the prompt's last block, and never again"


def test_beside_other_requests_and_sessions() -> None:
    generator = make_generator(40, max_tokens_per_step=16, model=FakeModel(eos_bias=-50.0))
    prompts = random_prompts(8, 6, longest=60)
    config = SamplingConfig(num_beams=3, num_return_sequences=2, max_new_tokens=25)
    undisturbed = lambda: make_generator(model=FakeModel(eos_bias=-50.0))
    expected = [rows_of(undisturbed().generate(prompt, config)) for prompt in prompts[:3]]

    def search(prompt: list[int]) -> list[tuple]:
        return rows_of(generator.generate(prompt, config))

    def plain(prompt: list[int]) -> list[int]:
        return generator.generate(prompt, SamplingConfig(max_new_tokens=40)).generated_token_ids[0]

    def session(prompt: list[int]) -> list[int]:
        with Session(generator.driver) as s:
            return [int(s.append([token]).argmax()) for token in prompt]

    with ThreadPoolExecutor(6) as threads:
        work = [search, search, search, plain, plain, session]
        results = list(threads.map(lambda do, prompt: do(prompt), work, prompts, timeout=120))
    model, last = generator.engine.model, prompts[5]
    assert results[:3] == expected
    assert results[3:5] == [greedy(model, prompt, 40) for prompt in prompts[3:5]]
    assert results[5] == [int(model.logits_of(last[: end + 1]).argmax()) for end in range(len(last))]
    check_idle(generator)


def test_no_more_beams_at_once_than_there_are_places() -> None:
    generator = make_generator(max_sequences_per_step=8)
    widths = []
    generator.engine.model.hook = lambda batch: widths.append(len(batch.spans.kv_len))
    config = SamplingConfig(num_beams=3, max_new_tokens=10, ignore_eos=True)
    generator.generate(random_prompts(5, 12, longest=9), config)
    assert max(widths) == 6
    widths.clear()
    generator.generate([[5]], SamplingConfig(num_beams=11, max_new_tokens=3, ignore_eos=True))
    assert max(widths) == 11, "one search runs in any case"


def test_many_prompts_in_few_sequences() -> None:
    generator = make_generator(max_sequences_per_step=8)
    prompts, counts, config = random_prompts(9, 60, longest=5), [], SamplingConfig(num_beams=2, max_new_tokens=3)
    sequences = generator.engine.scheduler.sequences
    generator.engine.model.hook = lambda batch: counts.append(len(list(sequences())))
    out = generator.generate(prompts, config)
    assert max(counts) <= 8 and len(out.texts) == 60
    alone = [rows_of(make_generator().generate(prompt, config)) for prompt in prompts[41:43]]
    assert rows_of(out)[41:43] == [row for rows in alone for row in rows]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [1, 2, 5, 11])
def test_a_search_whose_step_fails_leaves_nothing(fail_at: int) -> None:
    generator = make_generator(20)
    prompts = random_prompts(3, 3)
    config = SamplingConfig(num_beams=4, num_return_sequences=3, max_new_tokens=20, ignore_eos=True)
    expected = rows_of(generator.generate(prompts, config))
    model = generator.engine.model

    def strike(batch: object) -> None:
        if model.num_calls == fail_at:
            raise RuntimeError("planted")

    model.num_calls, model.hook = 0, strike
    with pytest.raises(RuntimeError, match="planted"):
        generator.generate(prompts, config)
    check_idle(generator)
    assert not generator.engine.between_steps
    model.hook = lambda batch: None
    assert rows_of(generator.generate(prompts, config)) == expected


@pytest.mark.parametrize("offset", sample(range(3), lambda offset: offset == 1))
def test_an_error_at_any_line_of_moving_beams_ends_one_search_and_leaves_the_other_right(offset: int) -> None:
    prompts = random_prompts(6, 2)
    config = SamplingConfig(num_beams=4, num_return_sequences=3, max_new_tokens=8, ignore_eos=True)
    expected = rows_of(make_generator().generate(prompts, config))
    within = in_functions("fork", "free", "truncate", "share", "give_back", "resume", "remove")
    for number in range(1 + 7 * offset, 600, 21):
        generator = make_generator()
        searches, error = searches_of(generator, prompts, config), RuntimeError("planted")
        with by_hand(generator) as hand:
            is_reached = raises_before_line(number, error, lambda: run(hand, searches), within)
            run(hand, searches)
            hand.engine.check_idle()
            assert not hand.engine.between_steps and hand.engine.cache.used_bytes == 0
        assert is_reached
        failed = [search for search in searches if search.rows[0].error is not None]
        assert all(row.error is error for search in failed for row in search.rows)
        assert len(failed) <= 1
        for search, rows in zip(searches, (expected[:3], expected[3:])):
            assert search in failed or rows_found([search]) == rows


def run(hand: ByHand, searches: list[BeamSearch]) -> None:
    """Starts the searches that have not started, and steps until all are over."""
    for search in searches:
        if search.advance not in hand.engine.between_steps:
            search.start(hand.engine)
    while not all(search.is_over for search in searches):
        hand.step()


def in_functions(*names: str) -> Callable[[CodeType], bool]:
    """Returns a predicate: True for code of functions with these names."""
    return lambda code: code.co_name in names


def test_a_cancelled_search_tells_the_best_so_far() -> None:
    generator = make_generator(model=FakeModel(eos_bias=-50.0))
    (search,) = searches_of(generator, [[5, 6, 7]])
    with by_hand(generator) as hand:
        search.start(hand.engine)
        for _ in range(6):
            hand.step()
        search.cancel()
        hand.engine.check_idle()
        search.cancel()
    assert [row.finish_reason for row in search.rows] == ["cancelled"] * 3
    assert [row.num_generated for row in search.rows] == [5] * 3
    scores = [row.score for row in search.rows]
    assert scores == sorted(scores, reverse=True) and len({tuple(row.tokens) for row in search.rows}) == 3
    (early,) = searches_of(generator, [[5, 6, 7]])
    early.cancel()
    assert [row.finish_reason for row in early.rows] == ["cancelled"] * 3 and early.rows[0].num_generated == 0


def test_a_search_that_another_move_of_the_same_step_cancels_ends_once() -> None:
    generator = make_generator()
    (search,) = searches_of(generator, [[5, 6, 7]])
    listener = Listener()
    for row in search.rows:
        row.sink = listener
    with by_hand(generator) as hand:
        hand.engine.between_steps.append(lambda: search.cancel() if hand.engine.model.num_calls == 4 else None)
        search.start(hand.engine)
        while not search.is_over:
            hand.step()
        assert not hand.step()
        hand.engine.check_idle()
        hand.engine.between_steps.clear()
    assert listener.heard == [("cancelled", None)] * 3
    assert all(row.num_generated > 0 for row in search.rows), "the best so far"


@pytest.mark.parametrize("when", [0, 1, 5, 30])
def test_a_call_is_cancelled_from_another_thread(when: int) -> None:
    generator = make_generator(model=FakeModel(eos_bias=-50.0), max_sequences_per_step=8)
    event, model = threading.Event(), generator.engine.model
    model.hook = lambda batch: event.set() if model.num_calls >= when - 1 else None
    if not when:
        event.set()
    config = SamplingConfig(num_beams=4, num_return_sequences=2, max_new_tokens=20)
    out = generator.generate(random_prompts(7, 6, longest=9), config, cancel=event)
    reasons = out.finish_reasons
    assert len(reasons) == 12 and "cancelled" in reasons and ("length" in reasons) == (when == 30)
    assert all(len(row) == 20 for row, reason in zip(out.generated_token_ids, reasons) if reason == "length")
    check_idle(generator)
    assert not generator.engine.between_steps


def test_an_error_of_one_search_is_told_and_ends_it_alone() -> None:
    generator = make_generator()
    (other,) = searches_of(generator, [[9, 8]])
    rows = Listener()
    for row in other.rows:
        row.sink = rows
    with by_hand(generator) as hand:
        other.start(hand.engine)

    def broken(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6:
            raise RuntimeError("the processor's own")
        return logits

    config = SamplingConfig(num_beams=3, max_new_tokens=20, logits_processors=[broken], ignore_eos=True)
    with pytest.raises(RuntimeError, match="processor's own"):
        generator.generate([[5], [6, 7]], config)
    generator.driver.call(lambda engine: [engine.step() for _ in range(60)]).result(60)
    assert other.is_over and other.rows[0].error is None
    assert [error for _, error in rows.heard] == [None] * 3, "each row heard of its end once"
    assert rows_found([other]) == rows_of(make_generator().generate([9, 8], BEAMS))
    check_idle(generator)


def test_bans_may_leave_less_texts_than_beams() -> None:
    """Only tokens 4 and 5 are allowed, so there are four texts of two tokens."""
    bans = {token: -np.inf for token in range(50) if token not in (4, 5)}
    config = dict(num_beams=6, max_new_tokens=2, logit_bias=bans, ignore_eos=True)
    out = make_generator().generate([[7]], SamplingConfig(num_return_sequences=4, **config))
    assert sorted(out.generated_token_ids) == [[4, 4], [4, 5], [5, 4], [5, 5]]
    with pytest.raises(ValueError, match="found 4 texts, but num_return_sequences=5"):
        make_generator().generate([[7]], SamplingConfig(num_return_sequences=5, **config))
    for added, message in ((np.nan, "NaN or inf"), (np.inf, "NaN or inf"), (-np.inf, "found 0 texts")):
        config = SamplingConfig(num_beams=2, logits_processors=[lambda ids, logits: logits + added])
        with pytest.raises(ValueError, match=message):
            make_generator().generate([[7]], config)
