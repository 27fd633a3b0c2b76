"""Many chats, event loops and threads on one engine; cancelling; and a loop that is never blocked."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from kani import ChatMessage, Kani

from pace.assets import TINY
from pace.integrations.kani import PaceEngine
from tests.llm.generators import num_at_work
from tests.waiting import PATIENCE, Gate, until

STORIES = [f"Tell me a story about a {animal}." for animal in ("dog", "cat", "bear", "fox", "robot", "bird")]


def stepwise(step):
    """Hyperparameters of an answer that calls `step()` for each token."""
    return {"logits_processors": [lambda ids, logits: (step(), logits)[1]], "ignore_eos": True}


@pytest.fixture(scope="module")
def alone(model):
    """The answers to the stories, asked one at a time."""
    engine = PaceEngine(model=model)
    return [asyncio.run(Kani(engine).chat_round_str(story)) for story in STORIES]


def test_chats_at_once_have_the_texts_they_have_alone(engine, model, run, alone):
    async def streamed(story):
        stream = Kani(engine).chat_round_stream(story)
        return "".join([piece async for piece in stream]).strip()

    async def at_once():
        most = 0

        async def watch():
            nonlocal most
            while True:
                most = max(most, num_at_work(model))
                await asyncio.sleep(0.002)

        watcher = asyncio.create_task(watch())
        predicted = [Kani(engine).chat_round_str(story) for story in STORIES]
        texts = await asyncio.gather(*predicted, *map(streamed, STORIES))
        watcher.cancel()
        return texts, most

    texts, most = run(at_once())
    assert texts == alone * 2 and most > 2, "they ran at once"


def test_engines_outlive_event_loops_and_serve_several(engine, run, alone):
    texts = {}
    threads = [
        threading.Thread(target=lambda story=story: texts.update({story: run(Kani(engine).chat_round_str(story))}))
        for story in STORIES
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [texts[story] for story in STORIES] == alone


@pytest.mark.parametrize("way", ["predict", "stream"])
def test_the_loop_goes_on(engine, run, way):
    """Each step waits until the loop has had a turn meanwhile."""
    has_turned = threading.Event()

    def step():
        has_turned.clear()
        assert has_turned.wait(PATIENCE), "the loop is blocked"

    async def ask(story):
        messages, hyperparams = [ChatMessage.user(story)], {"max_tokens": 30, **stepwise(step)}
        if way == "predict":
            return await engine.predict(messages, **hyperparams)
        return [item async for item in engine.stream(messages, **hyperparams)]

    async def watched():
        task = asyncio.gather(*[ask(story) for story in STORIES])
        while not task.done():
            await asyncio.sleep(0.0005)
            has_turned.set()
        await task

    run(watched())


def test_a_cancelled_answer_ends_at_once(engine, model, run):
    """It does not wait for the step under way, after which the engine is free."""
    gate, steps = Gate(), []

    async def play():
        step = lambda: (steps.append(1), gate())
        task = asyncio.create_task(engine.predict([ChatMessage.user(STORIES[0])], **stepwise(step)))
        await until(gate.is_inside.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert num_at_work(model)
        gate.open()
        await until(lambda: not num_at_work(model))

    run(play())
    assert len(steps) == 1


@pytest.mark.parametrize("way", ["break", "close", "cancel"])
def test_a_stream_that_is_left_ends(engine, model, run, way):
    steps = []

    def step():
        steps.append(1)
        time.sleep(0.02)

    async def play():
        async def read():
            stream = Kani(engine).chat_round_stream(STORIES[0], **stepwise(step))
            async for _ in stream:
                if way == "break":
                    return
                has_begun.set()

        has_begun = asyncio.Event()
        if way == "close":
            stream = engine.stream([ChatMessage.user(STORIES[0])], **stepwise(step))
            assert await anext(stream) and num_at_work(model)
            await stream.aclose()
        elif way == "cancel":
            task = asyncio.create_task(read())
            await has_begun.wait()
            task.cancel()
        else:
            await read()
        num_steps = len(steps)
        await until(lambda: not num_at_work(model))
        assert len(steps) - num_steps < 400, f"{len(steps) - num_steps} steps; a whole answer has 1000"

    run(play())


def test_a_beam_search_is_cancelled(engine, model, run, slow):
    async def play():
        messages = [ChatMessage.user(STORIES[0])]
        task = asyncio.create_task(engine.predict(messages, num_beams=4, max_tokens=900, **slow(0.02)))
        await until(lambda: num_at_work(model))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not num_at_work(model))
        return task.cancelled()

    assert run(play())


def test_no_more_answers_at_once_than_asked_for(make_engine, model, run):
    engine = make_engine(max_concurrency=2)

    async def play():
        task = asyncio.gather(*[engine.predict([ChatMessage.user(story)], max_tokens=40) for story in STORIES])
        most = 0
        while not task.done():
            most = max(most, num_at_work(model))
            await asyncio.sleep(0.0005)
        await task
        return most

    assert run(play()) == 2
    assert run(play()) == 2, "on another event loop"


def test_who_waits_for_room_and_gives_up_takes_none(make_engine, run):
    engine, gate = make_engine(max_concurrency=1), Gate()
    message = [ChatMessage.user(STORIES[0])]

    async def play():
        first = asyncio.create_task(engine.predict(message, max_tokens=8, **stepwise(gate)))
        others = [asyncio.create_task(engine.predict(message, max_tokens=1)) for _ in range(3)]
        await until(gate.is_inside.is_set)
        others[0].cancel()
        others[2].cancel()
        gate.open()
        done = await asyncio.gather(first, *others, return_exceptions=True)
        return [isinstance(result, asyncio.CancelledError) for result in done]

    assert run(play()) == [False, True, False, True] and engine._slots._num_free == 1
    assert run(engine.predict(message, max_tokens=1)).completion_tokens == 1


def test_a_stream_may_wait_so_long_and_no_longer(engine, model, run, slow):
    async def play():
        with pytest.raises(TimeoutError):
            async for _ in engine.stream([ChatMessage.user(STORIES[0])], streamer_timeout=0.1, **slow(0.6)):
                pass
        await until(lambda: not num_at_work(model))

    run(play())


def test_closing_ends_what_is_on_its_way(run, slow):
    engine = PaceEngine(TINY, model_load_kwargs={"dtype": "float32", "progress": False})

    async def play():
        task = asyncio.create_task(engine.predict([ChatMessage.user(STORIES[0])], **slow(0.02)))
        await until(lambda: num_at_work(engine.model))
        await engine.close()
        with pytest.raises(ValueError, match="closed"):
            await task

    run(play())


def test_nothing_is_asked_of_the_hub(monkeypatch, run):
    """Lookups for a local directory never contact the Hub."""

    class Refused(socket.socket):
        def connect(self, address):
            raise AssertionError(f"someone connects to {address}")

    monkeypatch.setattr(socket, "socket", Refused)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    engine = PaceEngine(str(TINY), model_load_kwargs={"dtype": "float32", "progress": False})
    message = [ChatMessage.user(STORIES[0])]
    assert engine.prompt_len(message) > 5
    monkeypatch.undo()
    run(engine.close())
