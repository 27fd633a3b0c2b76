"""Generation cancelled by another thread, by a callback or by a streamer."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pace.llm import CallbackStreamer, SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from tests.llm.engine.test_engine import ScriptedDrafter
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer, greedy
from tests.llm.generators import check_idle, make_generator, random_prompts


def test_another_thread_cancels_a_running_generate() -> None:
    model = FakeModel(eos_bias=-50.0)
    generator = make_generator(model, max_sequences_per_step=4)
    cancel, prompts = threading.Event(), random_prompts(3, 10)
    events, has_tokens = [], threading.Event()
    hear = lambda event: events.append(event) or (has_tokens.set() if len(events) > 20 else None)
    arguments = prompts, SamplingConfig(max_new_tokens=3000), CallbackStreamer(hear, FakeTokenizer()), cancel
    other = generator.add_request([9], SamplingConfig(max_new_tokens=30))
    with ThreadPoolExecutor() as threads:
        result = threads.submit(generator.generate, *arguments)
        assert has_tokens.wait(60)
        cancel.set()
        out = result.result(60)
    assert out.finish_reasons == ["cancelled"] * 10
    lengths = [len(tokens) for tokens in out.generated_token_ids]
    assert sum(lengths) > 20 and max(lengths) < 3000 and lengths[4:] == [0] * 6, "four ran, six waited"
    assert out.output_token_ids.shape == (10, max(map(len, prompts)) + max(lengths))
    for prompt, tokens in zip(prompts[:4], out.generated_token_ids):
        assert tokens == greedy(model, prompt, len(tokens))
    for row in range(10):
        mine = [event for event in events if event.row == row]
        assert [event.token for event in mine] == [*out.generated_token_ids[row], None]
        assert mine[-1].finish_reason == "cancelled"
        assert "".join(event.text for event in mine) == out.texts[row]
    assert len(other.result(60).generated_token_ids[0]) == 30
    check_idle(generator)


def test_a_call_cancelled_before_it_starts_does_nothing() -> None:
    generator = make_generator()
    cancel = threading.Event()
    cancel.set()
    out = generator.generate([[1, 2], [3]], SamplingConfig(logprobs=1, prompt_logprobs=1), cancel=cancel)
    assert out.generated_token_ids == [[], []] and out.finish_reasons == ["cancelled"] * 2 and out.texts == ["", ""]
    assert out.output_token_ids.tolist() == [[1, 2], [0, 3]]
    assert out.logprobs == [[], []] and out.prompt_logprobs == [[None, None], [None]]
    assert generator.engine.model.num_calls == 0
    assert out.metrics.num_generated_tokens == 0 and "0 new tokens" in str(out.metrics)
    with pytest.raises(TypeError, match="cancel must be a threading.Event"):
        generator.generate([1], cancel=True)
    check_idle(generator)


@pytest.mark.parametrize("length", [0, 6])
@pytest.mark.parametrize("stop_at", [1, 2, 7])
def test_a_callback_ends_its_row_with_the_token_it_was_told(length: int, stop_at: int) -> None:
    """Also if a step yields several tokens, as with drafts."""
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
    first, second, third = alone.generated_token_ids
    assert out.generated_token_ids == [first, second[:stop_at], third]
    assert out.logprobs[1] == alone.logprobs[1][:stop_at]
    for row in range(3):
        assert [event.token for event in events if event.row == row] == [*out.generated_token_ids[row], None]
    check_idle(generator)


def test_false_with_the_last_token_is_too_late() -> None:
    told: list[int | None] = []
    streamer = CallbackStreamer(lambda event: told.append(event.token) or len(told) < 3)
    out = make_generator(FakeModel(eos_bias=-50.0)).generate([1], SamplingConfig(max_new_tokens=3), streamer)
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
