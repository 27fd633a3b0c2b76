"""Asyncio tasks that read generated text. They read the same as threads do, and the event loop is not blocked."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
from pace.llm.clients import notifiers
from tests.llm.fake_model import FakeModel, greedy
from tests.llm.generators import by_hand, check_idle, make_generator, num_at_work
from tests.waiting import PATIENCE, Gate, until, wait_until

STORY = "Once upon a time"
SHORT = SamplingConfig(max_new_tokens=24)


@pytest.fixture(scope="module")
def model():
    with LLMModel(TINY, dtype="float32", progress=False) as model:
        yield model


def run(coroutine):
    async def within():
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(within())


async def text_of(pieces) -> str:
    return "".join([piece async for piece in pieces])


def stepwise(step: Callable[[], object] = lambda: time.sleep(0.02)) -> SamplingConfig:
    """Returns a config for 900 tokens. `step` is called for each of them, and takes 20 ms by default."""
    return SamplingConfig(
        max_new_tokens=900, ignore_eos=True, logits_processors=[lambda ids, logits: (step(), logits)[1]]
    )


# -- same output as in threads -----------------------------------------------------------------------------------------


def test_pieces_are_those_of_a_stream(model):
    async def read():
        return [piece async for piece in model.astream(STORY, SHORT)]

    assert run(read()) == list(model.stream(STORY, SHORT))


def test_events_are_those_that_threads_see(model):
    config = SamplingConfig(max_new_tokens=12, num_return_sequences=3, do_sample=True, seed=4, logprobs=1)

    async def read():
        return [event async for event in model.add_request(STORY, config).aevents()]

    def rows(events):
        return [[event for event in events if event.row == row] for row in range(3)]

    assert rows(run(read())) == rows(list(model.add_request(STORY, config).events()))


def test_a_finished_request_is_read_from_its_beginning(model):
    request = model.add_request(STORY, SHORT)
    text = request.result().texts[0]
    assert run(text_of(request)) == run(text_of(request)) == text


def test_several_tasks_and_a_thread_read_one_request(model):
    async def read():
        request = model.add_request(STORY, SHORT)
        return await asyncio.gather(text_of(request), text_of(request), asyncio.to_thread(lambda: "".join(request)))

    assert run(read()) == model.generate(STORY, SHORT).texts * 3


def test_two_loops_read_at_once(model):
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda _: run(text_of(model.astream(STORY, SHORT))), range(4)))
    assert texts == model.generate(STORY, SHORT).texts * 4


def test_a_chat_gives_its_events_to_tasks_once(model):
    question = "What is the capital of Japan?"

    async def read():
        answer = model.chat(question, stream=True)
        events = [event async for event in answer]
        assert [event async for event in answer] == [] == list(answer)
        return events, answer.output

    events, output = run(read())
    assert events == list(model.chat(question, stream=True)) and "".join(event.text for event in events) == output.text


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_told_with_the_first_piece(model):
    with pytest.raises(ValueError, match="prompt and output together"):
        run(text_of(model.astream([5] * 2000)))
    with pytest.raises(ValueError, match="astream returns one text, got num_return_sequences"):
        run(text_of(model.astream(STORY, SamplingConfig(num_return_sequences=2, do_sample=True))))


def test_what_goes_wrong_with_a_request_is_raised(model):
    pieces = []

    def fail(ids, logits):
        if ids.shape[1] > 8:
            wait_until(lambda: pieces)  # earlier tokens are read
            raise ArithmeticError("too long for me")
        return logits

    async def read():
        with pytest.raises(ArithmeticError, match="too long for me"):
            async for piece in model.astream(STORY, SamplingConfig(logits_processors=[fail])):
                pieces.append(piece)

    run(read())


# -- early ends --------------------------------------------------------------------------------------------------------


def test_a_task_that_is_cancelled_ends_its_generation(model):
    """It does not wait for the step under way, and no other follows."""
    gate, steps = Gate(), []

    async def play():
        pieces = []

        async def read():
            async for piece in model.astream(STORY, stepwise(lambda: (steps.append(1), len(steps) > 8 and gate()))):
                pieces.append(piece)

        task = asyncio.create_task(read())
        await until(lambda: gate.is_inside.is_set() and pieces)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        num_pieces = len(pieces)
        gate.open()
        await until(lambda: not num_at_work(model))
        assert num_pieces == len(pieces) <= len(steps) == 9

    run(play())


def test_who_waits_hears_that_another_has_cancelled(model):
    async def play():
        request = model.add_request(STORY, stepwise())

        async def read():
            return [event async for event in request.aevents()]

        readers = asyncio.gather(read(), read())
        await until(lambda: len(request.tokens) >= 3)
        request.cancel()
        first, second = await readers
        assert first == second and first[-1].finish_reason == "cancelled" and len(first) == len(request.tokens) + 1

    run(play())


@pytest.mark.parametrize("how", ["close", "break"])
def test_an_iteration_that_is_left_ends_its_generation(model, how):
    async def play():
        stream = model.astream(STORY, stepwise())
        async for _ in stream:
            break
        assert num_at_work(model)
        if how == "close":
            await stream.aclose()
        else:
            del stream
            gc.collect()
        await until(lambda: not num_at_work(model))

    run(play())


def test_a_loop_that_ends_amid_a_generation_ends_it():
    generator = make_generator(FakeModel(eos_bias=-50.0))

    async def begin():
        tokens = generator.add_request([1, 2], SamplingConfig(max_new_tokens=3000)).aevents()
        return (await anext(tokens)).token

    assert asyncio.run(begin()) == greedy(generator.engine.model, [1, 2], 1)[0]
    check_idle(generator)


# -- the loop is not blocked -------------------------------------------------------------------------------------------


def test_the_loop_goes_on_while_steps_are_slow(model):
    """The first step waits until the loop has had twenty turns."""
    gate = Gate()

    async def play():
        stream = model.astream(STORY, stepwise(gate))
        task = asyncio.create_task(anext(stream))
        await until(gate.is_inside.is_set)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not task.done()
        gate.open()
        await task
        await stream.aclose()

    run(play())


def test_the_loop_has_turns_while_a_long_text_is_read(model):
    request = model.add_request(STORY, SamplingConfig(max_new_tokens=400, ignore_eos=True))
    request.result()

    async def play():
        turns = 0

        async def count():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        other = asyncio.create_task(count())
        num_events = len([event async for event in request.aevents()])
        other.cancel()
        return num_events, turns

    num_events, turns = run(play())
    assert num_events == 401 and turns >= 401 // 32


def test_one_wake_is_for_all_requests(model):
    """Several requests of the same hundred steps wake the loop for first tokens, ends, and sometimes in between."""
    config, num_requests = SamplingConfig(max_new_tokens=100, ignore_eos=True), 8

    async def read():
        loop, wakes = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *arguments, **options: wakes.append(1) or call(*arguments, **options)

        async def follow(request):
            return len([event async for event in request.aevents()])

        with by_hand(model):
            requests = [model.add_request(STORY, config) for _ in range(num_requests)]
            tasks = asyncio.gather(*map(follow, requests))
            await asyncio.sleep(0.001)  # they wait
        return await tasks, len(wakes)

    numbers, num_wakes = run(read())
    assert numbers == [101] * num_requests
    # A single wake is possible: on a busy machine the engine may finish before the loop runs.
    assert 1 <= num_wakes <= 100 + 2 * num_requests, f"{num_wakes} wakes for a hundred steps"


def test_loops_that_are_gone_are_forgotten(model):
    gc.collect()
    before = len(notifiers._wakers)
    for _ in range(3):
        asyncio.run(text_of(model.astream(STORY, SHORT)))
    # The engine's thread may still hold the wakeup of the last loop.
    wait_until(lambda: (gc.collect(), len(notifiers._wakers) <= before)[1])
