"""The order of service: by arrival and priority. Large batches do not block other requests."""

from __future__ import annotations

import io
import random
import sys
import time
import weakref
from collections import Counter

import pytest
import torch

from pace.llm import CallbackStreamer, SamplingConfig
from pace.llm.clients.requests import Request
from pace.llm.clients.streamer import ProgressBar, Streamer, make_streamer
from pace.llm.clients.token_log import TokenEvent, TokenLog
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.scheduler import ARRIVALS_PER_PRIORITY
from pace.llm.generator import Generator
from pace.llm.sampling.logits import LogitsProcessor
from tests.llm.fake_model import FakeModel
from tests.llm.generators import by_hand, check_idle, driver_of, make_generator, random_prompts
from tests.waiting import wait_until

# -- order of service --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_at_once", [1, 3])
@pytest.mark.parametrize("low, high", [(0, 1), (0, 2), (-1, 1), (0, 0), (1, 0)])
def test_a_stream_of_higher_priority_starves_no_one(num_at_once: int, low: int, high: int) -> None:
    """More requests of high priority arrive all the time, and more of them wait than can run."""
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=num_at_once)
    config = SamplingConfig(max_new_tokens=2)
    others: list[Request] = []
    with by_hand(generator) as engine:
        patient = generator.add_request([7], config, low)
        for _ in range(10_000):
            while sum(not other.done for other in others) < 2 * num_at_once:
                others.append(generator.add_request([len(others) % 49 + 1], config, high))
            if patient.tokens:
                break
            engine.step()
        num_before = sum(bool(other.tokens) for other in others)
    most = max(0, ARRIVALS_PER_PRIORITY * (high - low) - 1)  # requests that arrive later but are served first
    assert most <= num_before <= most + num_at_once - 1, "and those beside it in the same step"


def test_a_higher_priority_takes_the_place_of_one_that_runs_and_gives_it_back() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=1)
    computed = []
    generator.engine.model.hook = lambda batch: computed.append(len(batch.tokens))
    config = SamplingConfig(max_new_tokens=10)
    low, high = [1] * 30, [2] * 20
    with by_hand(generator) as engine:
        first = generator.add_request(low, config)
        engine.step()
        engine.step()
        second = generator.add_request(high, config, priority=1)
        engine.step()
        assert len(first.tokens) == 2 and len(second.tokens) == 1
        equal = generator.add_request(high, config, priority=1)
        while not second.done:
            engine.step()
        assert not equal.tokens and len(first.tokens) == 2, "one after the other, in order of arrival"
        while not equal.done:
            engine.step()
        assert len(first.tokens) == 2
    out = first.result()
    assert (
        out.metrics.num_preemptions == 1
        and str(out.metrics).endswith(", preemptions: 1")
        and second.result().metrics.num_preemptions == 0
    )
    assert sum(computed) == 30 + 9 + 2 * (20 + 9), "there was room for the blocks of all: nothing was computed twice"
    assert_as_alone_with(generator, first, low, config)
    check_idle(generator)


def assert_as_alone_with(generator: Generator, request: Request, prompt: list[int], config: SamplingConfig) -> None:
    fresh = FakeModel(eos_bias=generator.engine.model.eos_bias)
    assert request.tokens == make_generator(fresh).generate(prompt, config).generated_token_ids[0]


def test_a_higher_priority_takes_the_memory_of_one_that_runs() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), num_blocks=8)
    config = SamplingConfig(max_new_tokens=30)
    with by_hand(generator) as engine:
        first = generator.add_request([1] * 60, config)
        engine.step()
        second = generator.add_request([2] * 60, config, priority=1)
        engine.step()
    assert second.tokens and first.result().metrics.num_preemptions == 1
    for request, prompt in ((first, [1] * 60), (second, [2] * 60)):
        request.result()
        assert_as_alone_with(generator, request, prompt, config)
    check_idle(generator)


def test_no_one_is_preempted_for_one_that_would_not_fit_even_so() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), num_blocks=10)
    config = SamplingConfig(max_new_tokens=10)
    with by_hand(generator) as engine:
        first = generator.add_request([1] * 80, config, priority=2)
        second = generator.add_request([2] * 10, config)
        engine.step()
        large = generator.add_request([3] * 120, config, priority=1)
        engine.step()
        assert len(first.tokens) == len(second.tokens) == 2 and not large.tokens
    assert large.result().finish_reasons == ["length"]
    assert second.result().metrics.num_preemptions == 0
    check_idle(generator)


# -- many prompts ------------------------------------------------------------------------------------------------------


class Remembering(LogitsProcessor):
    """A processor that counts its living copies."""

    alive: weakref.WeakSet[Remembering] = weakref.WeakSet()
    most_alive = 0

    def fork(self) -> Remembering:
        copied = Remembering()
        Remembering.alive.add(copied)
        Remembering.most_alive = max(Remembering.most_alive, len(Remembering.alive))
        return copied

    def apply(self, logits: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("end_seconds, num_prompts", [(0.0, 1000), (0.001, 200)], ids=["1000", "ends-one-by-one"])
def test_many_prompts_run_in_bounded_memory(end_seconds: float, num_prompts: int) -> None:
    """Also if `end_seconds` pass after each end that the engine reports, before it reports the next one of the step.

    Before each step, the engine waits until the caller has seen all ends. Then it must hold twice the sequences of a
    step, until no prompt is left."""
    model = FakeModel(eos_bias=-50.0)
    generator = make_generator(model, num_blocks=60, max_sequences_per_step=16)
    engine, count, chance = generator.engine, Counter(), random.Random(2)
    submit, step, end = EngineDriver.submit, engine.step, TokenLog.end
    prompts = random_prompts(2, num_prompts, longest=12)

    def step_when_full() -> bool:
        most = min(2 * 16, num_prompts - count["ended"])
        wait_until(lambda: count["submitted"] - count["ended"] == most, 60)
        generator.driver._do_posted()
        assert len(engine.scheduler.waiting) + len(engine.scheduler.running) == most
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EngineDriver, "submit", lambda driver, group: (submit(driver, group), count.update(submitted=len(group)))
        )
        patch.setattr(TokenLog, "end", lambda *event: (end(*event), count.update(ended=1), time.sleep(end_seconds)))
        patch.setattr(engine, "step", step_when_full)
        patch.setattr(Remembering, "most_alive", 0)
        out = generator.generate(prompts, SamplingConfig(max_new_tokens=3, logits_processors=[Remembering()]))
        assert Remembering.most_alive <= 2 * 16 + 8, f"{Remembering.most_alive}, with some on their way in or out"
    assert len(out.generated_token_ids) == len(out.request_metrics) == num_prompts
    for row in chance.sample(range(num_prompts), 50):
        assert (
            out.generated_token_ids[row]
            == make_generator(model).generate(prompts[row], SamplingConfig(max_new_tokens=3)).generated_token_ids[0]
        )
    check_idle(generator)


def test_a_large_batch_does_not_stand_in_the_way_of_others() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=8)
    config = SamplingConfig(max_new_tokens=4)
    joined: list[Request] = []
    num_ended_before = []

    def watch(event) -> bool | None:
        if not joined:
            joined.append(generator.add_request([5, 6], config))
        if event.finish_reason:
            num_ended_before.append(joined[0].done)

    generator.generate([[index % 49 + 1] for index in range(400)], config, CallbackStreamer(watch))
    assert num_ended_before.index(True) <= 3 * 8, "after those that were there, and those beside it"


def test_samples_of_many_prompts_are_submitted_together() -> None:
    generator = make_generator(num_blocks=60, max_sequences_per_step=4)
    config = SamplingConfig(do_sample=True, seed=1, num_return_sequences=3, max_new_tokens=6, prompt_logprobs=True)
    prompts = random_prompts(6, 30, longest=40)
    out = generator.generate(prompts, config)
    for index in (0, 7, 29):
        alone = make_generator().generate(prompts[index], config)
        rows = slice(3 * index, 3 * index + 3)
        assert out.generated_token_ids[rows] == alone.generated_token_ids
        assert out.prompt_logprobs[rows] == alone.prompt_logprobs
    check_idle(generator)


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_sample_that_is_aborted_before_its_prompt_is_read_holds_nothing(ended: int) -> None:
    generator, prompt = make_generator(max_tokens_per_step=20), [index % 49 + 1 for index in range(100)]
    config = SamplingConfig(do_sample=True, seed=1, num_return_sequences=3, max_new_tokens=6, ignore_eos=True)
    expected = generator.generate(prompt, config).generated_token_ids
    with by_hand(generator) as engine:
        request = generator.add_request(prompt, config)
        engine.step()
        sample = request._sequences[ended]
        driver_of(generator).abort([sample])
        engine.step()
    output = request.result(60)
    rows = [row for row in range(3) if row != ended]
    assert output.finish_reasons[ended] == "cancelled" and not sample.block_table
    assert [output.generated_token_ids[row] for row in rows] == [expected[row] for row in rows]
    check_idle(generator)


def test_a_bar_is_shown_on_a_terminal_for_several_rows(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    config = SamplingConfig()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert type(make_streamer(None, config, 2, progress=True)) is Streamer, "no terminal"
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert type(make_streamer(None, config, 1, progress=True)) is Streamer
    assert type(make_streamer(None, config, 2, progress=False)) is Streamer
    assert not isinstance(make_streamer(CallbackStreamer(print), config, 2, progress=True), ProgressBar)
    bar = make_streamer(None, config, 2, progress=True)
    bar.on_start([[1], [2]])
    bar.bar.delay = 0
    bar.on_event(TokenEvent(0, finish_reason="stop", num_tokens=2))
    bar.bar.refresh()
    assert bar.bar.n == 1 and "1/2" in sys.stderr.getvalue() and "2 tokens" in sys.stderr.getvalue()
    bar.end()
    generator = make_generator()
    generator.progress = True
    assert len(generator.generate([[1], [2]], SamplingConfig(max_new_tokens=3)).generated_token_ids) == 2
