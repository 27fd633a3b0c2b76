"""Requests that come, join, wait, give way and leave: whatever happens around one, its tokens are those it has alone."""

from __future__ import annotations

import gc
import io
import random
import sys
import threading
import time
import weakref

import pytest
import torch

from pace.llm import CallbackStreamer, LLMModel, SamplingConfig
from pace.llm.drafter import NoDraft
from pace.llm.engine import Engine
from pace.llm.generator import Generator
from pace.llm.logits import LogitsProcessor
from pace.llm.requests import Request
from pace.llm.scheduler import HEAD_START
from pace.llm.streamer import NullFeed, ProgressFeed, make_feed
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer, greedy
from tests.llm.test_engine import ScriptedDrafter, random_prompts


class Odd(LogitsProcessor):
    """Follows the tokens: favours odd tokens after an odd number of generated ones, and refuses to lose count."""

    def __init__(self) -> None:
        self.total = 0

    def accept(self, token: int) -> None:
        self.total += token

    def rollback(self, num_tokens: int) -> None:
        self.total -= sum(self.seen[-num_tokens:])

    def apply(self, logits: torch.Tensor) -> None:
        assert self.total == sum(self.seen)
        logits[(len(self.seen) - self.num_prompt_tokens) % 2 :: 2] += 2.0


CONFIGS = [
    SamplingConfig(),
    SamplingConfig(repetition_penalty=1.3, no_repeat_ngram_size=2, logprobs=2),
    SamplingConfig(do_sample=True, seed=3, temperature=1.5, top_k=0),
    SamplingConfig(do_sample=True, seed=4, frequency_penalty=0.7, presence_penalty=0.2, min_p=0.02, prompt_logprobs=1),
    SamplingConfig(logits_processors=[Odd()], min_new_tokens=5),
    SamplingConfig(stop_strings=["q"], logits_processors=[lambda ids, logits: logits - logits[:, :1] * (ids.shape[1] % 3 == 0)]),
]


def make_generator(model: FakeModel | None = None, num_blocks: int = 5000, **limits: int) -> Generator:
    model = model or FakeModel()
    return Generator(Engine.create(model, OPS, num_blocks * model.kv_spec.block_bytes, **limits), FakeTokenizer(), SamplingConfig(eos_token_id=0))


def with_length(config: SamplingConfig, num_tokens: int) -> SamplingConfig:
    config = config.copy()
    config.max_new_tokens = max(num_tokens, config.min_new_tokens)
    return config


def check_idle(generator: Generator) -> None:
    gc.collect()
    generator.engine.check_idle()
    assert generator.engine.cache.used_bytes == 0


def assert_as_alone(request: Request, prompt: list[int], config: SamplingConfig) -> None:
    """The request's tokens and what belongs to them, or as many as a cancelled one has."""
    alone = make_generator().generate(prompt, config)
    if request.finish_reason == "cancelled":
        assert request.tokens == alone.generated_token_ids[0][: len(request.tokens)]
        return
    out = request.result()
    assert (out.generated_token_ids, out.texts, out.finish_reasons) == (alone.generated_token_ids, alone.texts, alone.finish_reasons)
    assert out.logprobs == alone.logprobs and out.prompt_logprobs == alone.prompt_logprobs
    assert torch.equal(out.output_token_ids, alone.output_token_ids)


# -- whatever happens around it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_tokens_do_not_depend_on_what_happens_around(seed: int) -> None:
    """Random limits, pool, order of arrival, priorities, joining at any step, and cancelling in the middle."""
    chance = random.Random(seed)
    model = FakeModel(eos_bias=chance.choice([-50.0, 0.0, 1.0]))
    limits = {"max_tokens_per_step": chance.choice([1, 5, 16, 512]), "max_sequences_per_step": chance.choice([1, 2, 5, 64])}
    generator = make_generator(model, num_blocks=chance.choice([9, 14, 40]), **limits)
    engine, requests = generator.engine, []
    for prompt in random_prompts(seed, 20, longest=60):
        config = with_length(chance.choice(CONFIGS), chance.randint(1, 60))
        requests.append((generator.add_request(prompt, config, chance.randint(-1, 1)), prompt, config))
        for _ in range(chance.choice([0, 0, 1, 9])):
            engine.step()
            engine.cache.check_integrity(engine.scheduler.sequences())
        if chance.random() < 0.25:
            chance.choice(requests)[0].cancel()
    while engine.step():
        engine.cache.check_integrity(engine.scheduler.sequences())
    for request, prompt, config in requests:
        fresh = FakeModel(eos_bias=model.eos_bias)
        alone = make_generator(fresh).generate(prompt, config)
        assert request.tokens == alone.generated_token_ids[0][: len(request.tokens)]
        if request.finish_reason != "cancelled":
            out = request.result()
            assert out.finish_reasons == alone.finish_reasons and out.generated_token_ids == alone.generated_token_ids
            assert out.texts == alone.texts and out.logprobs == alone.logprobs and out.prompt_logprobs == alone.prompt_logprobs
    check_idle(generator)


def test_every_order_of_arrival_gives_the_same() -> None:
    prompts = random_prompts(5, 6)
    expected = {}
    for seed in range(8):
        generator = make_generator(num_blocks=16, max_tokens_per_step=20)
        order = random.Random(seed).sample(range(6), 6)
        requests = {index: generator.add_request(prompts[index], with_length(CONFIGS[index], 30), index % 3) for index in order}
        tokens = {index: requests[index].result().generated_token_ids for index in range(6)}
        assert tokens == (expected or tokens)
        expected = tokens
        check_idle(generator)


def test_threads_add_wait_read_and_cancel_at_once() -> None:
    generator = make_generator(num_blocks=24, max_tokens_per_step=24, max_sequences_per_step=6)
    prompts = random_prompts(11, 48, longest=50)
    done: list[tuple] = []
    errors: list[BaseException] = []

    def work(index: int) -> None:
        chance = random.Random(index)
        try:
            for prompt in prompts[index::8]:
                config = with_length(chance.choice(CONFIGS), chance.randint(1, 40))
                request = generator.add_request(prompt, config, chance.randint(-2, 2))
                done.append((request, prompt, config))
                how = chance.randrange(4)
                if how == 0:
                    request.result()
                elif how == 1:
                    assert "".join(request) == request.text == request.result().texts[0]
                elif how == 2:
                    for _ in range(chance.randint(0, 5)):
                        generator.engine.step()
                    request.cancel()
                else:
                    alone = make_generator().generate(prompt, config)
                    assert generator.generate(prompt, config).generated_token_ids == alone.generated_token_ids
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors and len(done) == 48
    for request, prompt, config in done:
        if not request.done:
            request.result()
        assert_as_alone(request, prompt, config)
    check_idle(generator)


def test_requests_on_a_real_model_join_others_bit_for_bit(checkpoint) -> None:
    with LLMModel(checkpoint("llama")[0], dtype="float32", progress=False, kv_cache_bytes="1MiB") as model:
        chance = random.Random(1)
        prompts = [[chance.randrange(2, 280) for _ in range(chance.randint(1, 90))] for _ in range(12)]
        configs = [SamplingConfig(max_new_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1, do_sample=index % 2 == 1, seed=index) for index in range(12)]
        alone = [model.generate(prompt, config) for prompt, config in zip(prompts, configs)]
        requests = []
        for prompt, config in zip(prompts, configs):
            requests.append(model.add_request(prompt, config, priority=chance.randint(-3, 3)))
            model._engine.step()
        for request, out in zip(requests, alone):
            joined = request.result()
            assert joined.generated_token_ids == out.generated_token_ids
            assert joined.logprobs == out.logprobs and joined.prompt_logprobs == out.prompt_logprobs
        model._engine.check_idle()


# -- one request -------------------------------------------------------------------------------------------------------


def test_a_request_is_what_generate_gives() -> None:
    generator = make_generator()
    config = SamplingConfig(max_new_tokens=30, ignore_eos=True)
    request = generator.add_request([1, 2, 3], config)
    assert (request.tokens, request.text, request.done, request.finish_reason) == ([], "", False, None)
    pieces = iter(request)
    first = next(pieces)
    assert request.text.startswith(first) and 1 <= len(request.tokens) < 30
    out = generator.generate([1, 2, 3], config)
    assert out.generated_token_ids == [request.tokens] and request.done, "the other call's steps were the request's as well"
    assert first + "".join(pieces) == request.text == "".join(request) == out.texts[0], "who reads again reads from the beginning"
    assert request.result().generated_token_ids == out.generated_token_ids and request.finish_reason == "length"
    request.cancel()
    assert request.finish_reason == "length", "it is too late for that"


def test_a_request_that_takes_too_long_goes_on() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    request = generator.add_request([1], SamplingConfig(max_new_tokens=500))
    with pytest.raises(TimeoutError, match="tokens so far"):
        request.result(timeout=0.0)
    generator.engine.model.hook = lambda batch: time.sleep(0.01)
    with pytest.raises(TimeoutError):
        request.result(timeout=0.05)
    generator.engine.model.hook = lambda batch: None
    assert 0 < len(request.tokens) < 500 == len(request.result(timeout=60).generated_token_ids[0])


def test_a_request_that_fails_fails_alone() -> None:
    def refuse(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6:
            raise RuntimeError("the processor's own")
        return logits

    generator = make_generator()
    other = generator.add_request([4, 5], SamplingConfig(max_new_tokens=20, ignore_eos=True))
    request = generator.add_request([1, 2, 3], SamplingConfig(max_new_tokens=20, ignore_eos=True, logits_processors=[refuse]))
    assert len(other.result().generated_token_ids[0]) == 20
    assert request.done and request.finish_reason == "error" and len(request.tokens) == 4
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the processor's own"):
            request.result()
    with pytest.raises(RuntimeError, match="the processor's own"):
        list(request)
    check_idle(generator)


class Struck(Odd):
    strikes: list[int] = []

    def accept(self, token: int) -> None:
        super().accept(token)
        if len(self.seen) in self.strikes:
            self.strikes.remove(len(self.seen))
            raise KeyboardInterrupt


def test_ctrl_c_leaves_a_request_that_can_be_asked_again() -> None:
    """Only one whose processor was struck in the middle of its state is lost, and says so."""
    generator = make_generator(FakeModel(eos_bias=-50.0))
    config = SamplingConfig(max_new_tokens=20, do_sample=True, seed=2, repetition_penalty=1.2)
    expected = generator.generate([1, 2], config).generated_token_ids
    Struck.strikes = [5]
    request, torn = generator.add_request([1, 2], config), generator.add_request([3], SamplingConfig(max_new_tokens=20, logits_processors=[Struck()]))
    with pytest.raises(KeyboardInterrupt):
        request.result()
    assert 0 < len(request.tokens) < 20 and not request.done
    assert request.result().generated_token_ids == expected
    with pytest.raises(RuntimeError, match="Struck was interrupted while it followed its tokens"):
        torn.result()
    check_idle(generator)


def test_a_request_that_nobody_holds_leaves() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    request = generator.add_request([1] * 40, SamplingConfig(max_new_tokens=500))
    generator.engine.step()
    assert generator.engine.cache.used_bytes > 0
    del request
    check_idle(generator)


def test_what_a_request_cannot_be_is_told() -> None:
    generator = make_generator()
    for priority, error in ((101, ValueError), (-101, ValueError), (1.5, TypeError), (True, TypeError), ("high", TypeError)):
        with pytest.raises(error, match="priority must be an int from -100 to 100"):
            generator.add_request([1], priority=priority)
    with pytest.raises(ValueError, match="add_request continues one prompt once, and this call makes 2 texts"):
        generator.add_request([[1], [2]])
    with pytest.raises(ValueError, match="this call makes 3 texts"):
        generator.add_request([1], SamplingConfig(do_sample=True, num_return_sequences=3))
    with pytest.raises(ValueError, match="token id 999"):
        generator.add_request([999])
    check_idle(generator)
    mute = Generator(generator.engine)
    request = mute.add_request([1], SamplingConfig(max_new_tokens=3))
    with pytest.raises(ValueError, match="tokenizer"):
        iter(request)
    assert request.text == "" and len(request.result().generated_token_ids[0]) == 3


# -- the order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_at_once", [1, 3])
@pytest.mark.parametrize("low, high", [(0, 1), (0, 2), (-1, 1), (0, 0), (1, 0)])
def test_a_stream_of_higher_priority_starves_no_one(num_at_once: int, low: int, high: int) -> None:
    """There are always more of the high ones waiting than can run, and they never stop coming."""
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=num_at_once)
    config = SamplingConfig(max_new_tokens=2)
    patient = generator.add_request([7], config, low)
    others: list[Request] = []
    for _ in range(10_000):
        while sum(not other.done for other in others) < 2 * num_at_once:
            others.append(generator.add_request([len(others) % 49 + 1], config, high))
        if patient.tokens:
            break
        generator.engine.step()
    num_before = sum(bool(other.tokens) for other in others)
    most = max(0, HEAD_START * (high - low) - 1)  # those that arrive later and come first
    assert most <= num_before <= most + num_at_once - 1, "and those beside it in the same step"


def test_a_higher_priority_takes_the_place_of_one_that_runs_and_gives_it_back() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=1)
    computed = []
    generator.engine.model.hook = lambda batch: computed.append(len(batch.tokens))
    config = SamplingConfig(max_new_tokens=10)
    low, high = [1] * 30, [2] * 20
    first = generator.add_request(low, config)
    generator.engine.step()
    generator.engine.step()
    second = generator.add_request(high, config, priority=1)
    generator.engine.step()
    assert len(first.tokens) == 2 and len(second.tokens) == 1
    equal = generator.add_request(high, config, priority=1)
    assert second.result().finish_reasons == ["length"] and not equal.tokens and len(first.tokens) == 2, "one after the other, in order of arrival"
    assert equal.result() and len(first.tokens) == 2
    out = first.result()
    assert out.metrics.num_preemptions == 1 and second.result().metrics.num_preemptions == 0
    assert sum(computed) == 30 + 9 + 2 * (20 + 9), "there was room for the blocks of all: nothing was computed twice"
    assert_as_alone_with(generator, first, low, config)
    check_idle(generator)


def assert_as_alone_with(generator: Generator, request: Request, prompt: list[int], config: SamplingConfig) -> None:
    fresh = FakeModel(eos_bias=generator.engine.model.eos_bias)
    assert request.tokens == make_generator(fresh).generate(prompt, config).generated_token_ids[0]


def test_a_higher_priority_takes_the_memory_of_one_that_runs() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), num_blocks=8)
    config = SamplingConfig(max_new_tokens=30)
    first = generator.add_request([1] * 60, config)
    generator.engine.step()
    second = generator.add_request([2] * 60, config, priority=1)
    generator.engine.step()
    assert len(second.tokens) == 1 and first.result().metrics.num_preemptions == 1
    for request, prompt in ((first, [1] * 60), (second, [2] * 60)):
        request.result()
        assert_as_alone_with(generator, request, prompt, config)
    check_idle(generator)


def test_no_one_is_preempted_for_one_that_would_not_fit_even_so() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), num_blocks=10)
    config = SamplingConfig(max_new_tokens=10)
    first = generator.add_request([1] * 80, config, priority=2)
    second = generator.add_request([2] * 10, config)
    generator.engine.step()
    large = generator.add_request([3] * 120, config, priority=1)
    generator.engine.step()
    assert len(first.tokens) == len(second.tokens) == 2 and not large.tokens
    assert large.result().finish_reasons == ["length"]
    assert second.result().metrics.num_preemptions == 0
    check_idle(generator)


# -- many prompts --------------------------------------------------------------------------------------------------------


class Remembering(LogitsProcessor):
    """Has a state worth counting."""

    alive: weakref.WeakSet[Remembering] = weakref.WeakSet()
    most_alive = 0

    def __deepcopy__(self, memo: dict) -> Remembering:
        copied = Remembering()
        Remembering.alive.add(copied)
        Remembering.most_alive = max(Remembering.most_alive, len(Remembering.alive))
        return copied

    def apply(self, logits: torch.Tensor) -> None:
        pass


def test_2000_prompts_run_in_bounded_memory() -> None:
    model = FakeModel(eos_bias=-50.0)
    generator = make_generator(model, num_blocks=60, max_sequences_per_step=16)
    scheduler = generator.engine.scheduler
    in_engine, chance = [], random.Random(2)
    model.hook = lambda batch: in_engine.append(len(scheduler.waiting) + len(scheduler.running))
    prompts = random_prompts(2, 2000, longest=12)
    out = generator.generate(prompts, SamplingConfig(max_new_tokens=3, logits_processors=[Remembering()]))
    assert max(in_engine) == 16 and Remembering.most_alive <= 16 + 2
    assert sum(size == 16 for size in in_engine) > 0.95 * len(in_engine), "as many as may run, until few are left"
    assert len(out.generated_token_ids) == len(out.request_metrics) == 2000
    for row in chance.sample(range(2000), 50):
        assert out.generated_token_ids[row] == make_generator(model).generate(prompts[row], SamplingConfig(max_new_tokens=3)).generated_token_ids[0]
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
    assert 0 < num_ended_before.index(True) <= 2 * 8, "after those that were there, and those beside it"


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


def test_a_bar_is_shown_on_a_terminal_for_several_rows(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    config = SamplingConfig()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(make_feed(None, config, 2, progress=True), NullFeed), "no terminal"
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(make_feed(None, config, 1, progress=True), NullFeed)
    assert isinstance(make_feed(None, config, 2, progress=False), NullFeed)
    assert not isinstance(make_feed(CallbackStreamer(print), config, 2, progress=True), ProgressFeed)
    feed = make_feed(None, config, 2, progress=True)
    feed.start([[1], [2]])
    feed.bar.delay = 0
    feed.token(0, 5)
    feed.token(1, 5)
    feed.finished(0, "stop")
    feed.bar.refresh()
    assert feed.bar.n == 1 and "1/2" in sys.stderr.getvalue() and "2 tokens" in sys.stderr.getvalue()
    feed.end()
    generator = make_generator()
    generator.progress = True
    assert len(generator.generate([[1], [2]], SamplingConfig(max_new_tokens=3)).generated_token_ids) == 2


# -- cancelling ----------------------------------------------------------------------------------------------------------


def test_another_thread_cancels_a_running_generate() -> None:
    model = FakeModel(eos_bias=-50.0)
    generator = make_generator(model, max_sequences_per_step=4)
    cancel, prompts = threading.Event(), random_prompts(3, 10)
    short = SamplingConfig(max_new_tokens=3000)
    events = []
    has_tokens = threading.Event()
    streamer = CallbackStreamer(lambda event: events.append(event) or (has_tokens.set() if len(events) > 20 else None), FakeTokenizer())
    other = generator.add_request([9], SamplingConfig(max_new_tokens=30))
    results: list = []
    thread = threading.Thread(target=lambda: results.append(generator.generate(prompts, short, streamer, cancel)))
    thread.start()
    assert has_tokens.wait(60)
    cancel.set()
    thread.join(60)
    (out,) = results
    assert out.finish_reasons == ["cancelled"] * 10
    lengths = [len(tokens) for tokens in out.generated_token_ids]
    assert sum(lengths) > 20 and max(lengths) < 3000 and lengths[4:] == [0] * 6, "four ran, six waited"
    assert out.output_token_ids.shape == (10, max(map(len, prompts)) + max(lengths))
    for prompt, tokens in zip(prompts[:4], out.generated_token_ids):
        assert tokens == greedy(model, prompt, len(tokens))
    for row in range(10):
        mine = [event for event in events if event.row == row]
        assert [event.token for event in mine] == [*out.generated_token_ids[row], None] and mine[-1].finish_reason == "cancelled"
        assert "".join(event.text for event in mine) == out.texts[row]
    assert len(other.result().generated_token_ids[0]) == 30
    check_idle(generator)


def test_a_call_cancelled_before_it_starts_does_nothing() -> None:
    generator = make_generator()
    cancel = threading.Event()
    cancel.set()
    out = generator.generate([[1, 2], [3]], SamplingConfig(logprobs=1, prompt_logprobs=1), cancel=cancel)
    assert out.generated_token_ids == [[], []] and out.finish_reasons == ["cancelled"] * 2 and out.texts == ["", ""]
    assert out.output_token_ids.tolist() == [[1, 2], [0, 3]] and out.logprobs == [[], []] and out.prompt_logprobs == [[None, None], [None]]
    assert generator.engine.model.num_calls == 0
    assert out.metrics.num_generated_tokens == 0 and "0 new tokens" in str(out.metrics)
    with pytest.raises(TypeError, match="cancel must be a threading.Event"):
        generator.generate([1], cancel=True)
    check_idle(generator)


@pytest.mark.parametrize("length", [0, 6])
@pytest.mark.parametrize("stop_at", [1, 2, 7])
def test_a_callback_ends_its_row_with_the_token_it_was_told(length: int, stop_at: int) -> None:
    """Also where a step brings several tokens, as drafts do."""
    model = FakeModel(eos_bias=-50.0)
    engine = Engine.create(model, OPS, 1 << 20, drafter=ScriptedDrafter(model, random.Random(1), length))
    generator = Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))
    config = SamplingConfig(max_new_tokens=20, logprobs=1)
    alone = make_generator(FakeModel(eos_bias=-50.0)).generate([[1, 2], [3], [4]], config)
    events = []

    def take(event) -> bool | None:
        events.append(event)
        return sum(event.row == 1 for event in events) < stop_at if event.row == 1 else None

    out = generator.generate([[1, 2], [3], [4]], config, CallbackStreamer(take, FakeTokenizer()))
    assert out.finish_reasons == ["length", "cancelled", "length"]
    assert out.generated_token_ids == [alone.generated_token_ids[0], alone.generated_token_ids[1][:stop_at], alone.generated_token_ids[2]]
    assert out.logprobs[1] == alone.logprobs[1][:stop_at]
    for row in range(3):
        assert [event.token for event in events if event.row == row] == [*out.generated_token_ids[row], None]
    check_idle(generator)


def test_false_with_the_last_token_is_too_late() -> None:
    told: list[int | None] = []
    out = make_generator(FakeModel(eos_bias=-50.0)).generate([1], SamplingConfig(max_new_tokens=3), CallbackStreamer(lambda event: told.append(event.token) or len(told) < 3))
    assert out.finish_reasons == ["length"] and told == [*out.generated_token_ids[0], None]


class Putting:
    def __init__(self, stop_at: int) -> None:
        self.stop_at, self.calls = stop_at, []

    def put(self, value: torch.Tensor) -> bool:
        self.calls.append(value.tolist())
        return len(self.calls) < self.stop_at

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("stop_at", [1, 2, 5])
def test_a_streamer_that_puts_false_cancels(stop_at: int) -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    streamer = Putting(stop_at)
    out = generator.generate([1, 2], SamplingConfig(max_new_tokens=20), streamer)
    assert out.finish_reasons == ["cancelled"] and len(out.generated_token_ids[0]) == stop_at - 1
    assert streamer.calls == [[[1, 2]], *[[token] for token in out.generated_token_ids[0]], "end"]
    check_idle(generator)


# -- what is told --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"max_tokens_per_step": 1}, {"max_tokens_per_step": 7}, {"max_logit_rows_per_step": 3}])
@pytest.mark.parametrize("num_blocks", [7, 100])
def test_prompt_logprobs_are_those_of_the_model(limits: dict[str, int], num_blocks: int) -> None:
    model = FakeModel()
    generator = make_generator(model, num_blocks=num_blocks, **limits)
    prompts = [*random_prompts(4, 5, longest=60), [7], [7, 8]]
    config = SamplingConfig(max_new_tokens=25, ignore_eos=True, prompt_logprobs=2)
    out = generator.generate(prompts, config)
    for prompt, told in zip(prompts, out.prompt_logprobs):
        assert told[0] is None and len(told) == len(prompt)
        for index in range(1, len(prompt)):
            expected = OPS.log_softmax(model.logits_of(prompt[:index])[None])[0]
            assert told[index].token == prompt[index] and told[index].logprob == float(expected[prompt[index]])
            assert [token for token, _ in told[index].top] == expected.topk(2).indices.tolist()
    plain = make_generator(model).generate(prompts, SamplingConfig(max_new_tokens=25, ignore_eos=True))
    assert out.generated_token_ids == plain.generated_token_ids and plain.prompt_logprobs is None
    check_idle(generator)


def test_prompt_logprobs_are_scores_and_those_of_transformers(checkpoint) -> None:
    folder, oracle, _ = checkpoint("llama")
    with LLMModel(folder, dtype="float32", progress=False) as model:
        prompt = torch.randint(2, 280, (150,), generator=torch.Generator().manual_seed(1))
        out = model.generate(prompt.tolist(), SamplingConfig(max_new_tokens=2, prompt_logprobs=True))
        told = torch.tensor([entry.logprob for entry in out.prompt_logprobs[0][1:]])
        assert torch.equal(told, model.score(prompt.tolist())[0]), "bit by bit"
        with torch.no_grad():
            theirs = oracle(prompt[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(told, theirs[:-1].gather(1, prompt[1:, None])[:, 0], rtol=1e-3, atol=1e-4)  # what logits agree to


def test_more_prompt_logprobs_than_words_are_told() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs=51 asks for more tokens than the vocabulary's 50"):
        make_generator().generate([1], SamplingConfig(prompt_logprobs=51))


def test_each_row_has_metrics_of_its_own() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=2)
    generator.engine.model.hook = lambda batch: time.sleep(0.002)
    out = generator.generate([[1, 2, 3], [4], [5, 6]], SamplingConfig(max_new_tokens=5))
    assert [metrics.num_prompt_tokens for metrics in out.request_metrics] == [3, 1, 2]
    assert [metrics.num_generated_tokens for metrics in out.request_metrics] == [5, 5, 5]
    for metrics in out.request_metrics:
        assert 0 <= metrics.seconds_waiting < metrics.seconds_to_first_token < metrics.total_seconds <= out.metrics.total_seconds
        assert metrics.prefill_tokens_per_second > 0 and metrics.decode_tokens_per_second > 0 and metrics.num_preemptions == 0
        assert f"{metrics.num_prompt_tokens} prompt + 5 new tokens" in str(metrics)
    requests = [generator.add_request([token], SamplingConfig(max_new_tokens=5)) for token in (1, 2, 3)]
    waits = [request.result().metrics.seconds_waiting for request in requests]
    assert waits[2] > max(4 * 0.002, *waits[:2]), "two at a time: the third waited for five steps of theirs"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: " ".join(sorted(config.explicit_fields)))
@pytest.mark.parametrize("length", [1, 7])
def test_processors_of_every_kind_compose_with_drafts(length: int, config: SamplingConfig) -> None:
    model, config = FakeModel(), with_length(config, 40)
    engine = Engine.create(model, OPS, 30 * model.kv_spec.block_bytes, drafter=PlainContinuation(random.Random(1), length, config))
    out = Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0)).generate(prompts := random_prompts(length, 8), config)
    plain = make_generator().generate(prompts, config)
    assert (out.generated_token_ids, out.texts, out.finish_reasons) == (plain.generated_token_ids, plain.texts, plain.finish_reasons)
    assert out.logprobs == plain.logprobs and out.prompt_logprobs == plain.prompt_logprobs
    assert 0 < out.metrics.num_accepted_tokens < out.metrics.num_drafted_tokens, "some were taken, some rolled back"
    engine.check_idle()


class PlainContinuation(NoDraft):
    """Proposes what the same config gives without drafts, with a wrong token at random places."""

    def __init__(self, chance: random.Random, length: int, config: SamplingConfig) -> None:
        self.chance, self.length, self.config = chance, length, config
        self.known: dict[tuple[int, ...], list[int]] = {}

    def extend(self, spans, cache) -> None:
        for span in spans:
            sequence = span.sequence
            room = min(self.length, sequence.max_length - len(sequence.tokens) - 1)
            if span.num_rows == 1 and room > 0 and cache.reserve(sequence, len(sequence.tokens) + room):
                prompt = sequence.tokens[: sequence.num_prompt_tokens]
                if tuple(prompt) not in self.known:
                    self.known[tuple(prompt)] = make_generator().generate(prompt, self.config).generated_token_ids[0]
                drafts = self.known[tuple(prompt)][sequence.num_generated :][:room]
                span.drafts = [token if self.chance.random() < 0.7 else (token + 1) % 50 for token in drafts]


def test_no_logprob_is_told_of_a_draft_beyond_the_end() -> None:
    model = FakeModel(eos_bias=1.0)
    engine = Engine.create(model, OPS, 1 << 20, drafter=ScriptedDrafter(model, random.Random(1), 8))
    generator = Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))
    prompts, config = random_prompts(9, 20), SamplingConfig(max_new_tokens=30, logprobs=1)
    out, plain = generator.generate(prompts, config), make_generator(FakeModel(eos_bias=1.0)).generate(prompts, config)
    assert "stop" in out.finish_reasons and out.logprobs == plain.logprobs
    assert [[entry.token for entry in row] for row in out.logprobs] == out.generated_token_ids
