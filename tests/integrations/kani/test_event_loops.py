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

STORIES = [f"Tell me a story about a {animal}." for animal in ("dog", "cat", "bear", "fox", "robot", "bird")]


def at_work(model) -> int:
    return sum(1 for _ in model._engine.scheduler.sequences())


async def until_idle(model):
    while at_work(model):
        await asyncio.sleep(0.002)


async def turns_until(task: asyncio.Task) -> int:
    """Number of turns of a task that sleeps a millisecond per turn, until `task` is done. A blocked loop gives none, a
    busy machine fewer. docs/kani.md has the time for which the loop is blocked."""
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    return turns


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
                most = max(most, at_work(model))
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
        thread.join(60)
    assert [texts[story] for story in STORIES] == alone


@pytest.mark.alone
@pytest.mark.parametrize("way", ["predict", "stream"])
def test_the_loop_goes_on(engine, run, slow, way):
    """The loop runs during long steps, and during many quick ones. A blocked loop has a few turns, a running one
    hundreds."""

    async def ask(story, **hyperparams):
        if way == "predict":
            return await engine.predict([ChatMessage.user(story)], **hyperparams)
        return [item async for item in engine.stream([ChatMessage.user(story)], **hyperparams)]

    async def watched(*questions):
        task = asyncio.gather(*questions)
        turns = await turns_until(task)
        await task
        return turns

    turns = run(watched(ask(STORIES[0], max_tokens=4, **slow(0.4))))
    assert turns > 50, f"{turns} turns in 4 steps of 0.4 s"
    turns = run(watched(*[ask(story, max_tokens=300, ignore_eos=True) for story in STORIES]))
    assert turns > 50, f"{turns} turns in 300 steps of {len(STORIES)} sequences"


@pytest.mark.alone
def test_a_cancelled_answer_ends_at_once(engine, model, run, slow):
    async def play():
        task = asyncio.create_task(engine.predict([ChatMessage.user(STORIES[0])], **slow(1.0)))
        while not at_work(model):
            await asyncio.sleep(0.002)
        began = time.perf_counter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        returned = time.perf_counter() - began
        await until_idle(model)
        return returned, time.perf_counter() - began

    returned, idle = run(play())
    assert returned < 0.6, f"{returned:.2f} s; a token takes 1 s"
    assert idle < 10, f"{idle:.1f} s; the engine is free after the step under way"


@pytest.mark.alone
@pytest.mark.parametrize("way", ["break", "close", "cancel"])
def test_a_stream_that_is_left_ends(engine, model, run, slow, way):
    async def play():
        async def read():
            stream = Kani(engine).chat_round_stream(STORIES[0], **slow(0.02))
            async for _ in stream:
                if way == "break":
                    return
                has_begun.set()

        has_begun = asyncio.Event()
        if way == "close":
            stream = engine.stream([ChatMessage.user(STORIES[0])], **slow(0.02))
            assert await anext(stream) and at_work(model)
            await stream.aclose()
        elif way == "cancel":
            task = asyncio.create_task(read())
            await has_begun.wait()
            task.cancel()
        else:
            await read()
        began = time.perf_counter()
        await until_idle(model)
        return time.perf_counter() - began

    seconds = run(play())
    assert seconds < 8, f"{seconds:.1f} s; a whole answer takes twenty"


def test_a_beam_search_is_cancelled(engine, model, run, slow):
    async def play():
        messages = [ChatMessage.user(STORIES[0])]
        task = asyncio.create_task(engine.predict(messages, num_beams=4, max_tokens=900, **slow(0.02)))
        while not at_work(model):
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(until_idle(model), 10)
        return task.cancelled()

    assert run(play())


def test_no_more_answers_at_once_than_asked_for(make_engine, model, run):
    engine = make_engine(max_concurrency=2)

    async def play():
        task = asyncio.gather(*[engine.predict([ChatMessage.user(story)], max_tokens=40) for story in STORIES])
        most = 0
        while not task.done():
            most = max(most, at_work(model))
            await asyncio.sleep(0.0005)
        await task
        return most

    assert run(play()) == 2
    assert run(play()) == 2, "on another event loop"


def test_who_waits_for_room_and_gives_up_takes_none(make_engine, run, slow):
    engine = make_engine(max_concurrency=1)
    message = [ChatMessage.user(STORIES[0])]

    async def play():
        first = asyncio.create_task(engine.predict(message, max_tokens=8, **slow(0.05)))
        others = [asyncio.create_task(engine.predict(message, max_tokens=1)) for _ in range(3)]
        await asyncio.sleep(0.1)
        others[0].cancel()
        others[2].cancel()
        done = await asyncio.gather(first, *others, return_exceptions=True)
        return [isinstance(result, asyncio.CancelledError) for result in done]

    assert run(play()) == [False, True, False, True] and engine._slots._num_free == 1
    assert run(engine.predict(message, max_tokens=1)).completion_tokens == 1


def test_a_stream_may_wait_so_long_and_no_longer(engine, model, run, slow):
    async def play():
        with pytest.raises(TimeoutError):
            async for _ in engine.stream([ChatMessage.user(STORIES[0])], streamer_timeout=0.1, **slow(0.6)):
                pass
        await until_idle(model)

    run(play())


def test_closing_ends_what_is_on_its_way(run, slow):
    engine = PaceEngine(TINY, model_load_kwargs={"dtype": "float32", "progress": False})

    async def play():
        task = asyncio.create_task(engine.predict([ChatMessage.user(STORIES[0])], **slow(0.02)))
        while not at_work(engine.model):
            await asyncio.sleep(0.002)
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
