"""More requests than the engine runs at once: a bounded queue, honest waiting times, failures of one request only."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.llm.generators import by_hand
from tests.server.serving import ANSWER, LONG, QUESTION, Serving, make_generator, request_bytes, text_of
from tests.waiting import Gate, wait_until


async def ask_many(serving: Serving, bodies: list[dict]) -> list[tuple[int, bytes]]:
    """Status and answer of requests that are sent all at once."""

    async def one(body: dict) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        writer.write(request_bytes("/v1/chat/completions", body))
        data = await reader.read()
        writer.close()
        return int(data.split()[1]), data

    return await asyncio.gather(*map(one, bodies))


def test_a_thousand_at_once_are_all_answered():
    with Serving() as serving:
        bodies = [{"messages": QUESTION, "temperature": 0} for _ in range(1000)]
        replies = asyncio.run(ask_many(serving, bodies))
        statuses = [status for status, _ in replies]
        assert set(statuses) <= {200, 429} and statuses.count(200) >= 64
        assert all(ANSWER.encode() in data for status, data in replies if status == 200)
        assert all(b"retry-after:" in data.lower() for status, data in replies if status == 429)
        serving.check_well()


def test_streams_that_begin_at_once_have_their_exact_frames():
    fields = {"max_tokens": 16, "ignore_eos": True, "logprobs": True}
    questions = [[{"role": "user", "content": f"What comes after {number}?"}] for number in range(6)]
    with Serving() as serving:
        wholes = [serving.chat(question, **fields).json["choices"][0] for question in questions]
        with ThreadPoolExecutor(24) as clients:
            replies = list(clients.map(lambda question: serving.chat(question, stream=True, **fields), questions * 4))
    for whole, reply in zip(wholes * 4, replies, strict=True):
        events = reply.events
        assert events[0]["choices"][0]["delta"]["role"] == "assistant" and events[-1] == "[DONE]"
        assert text_of(events) == whole["message"]["content"]
        choices = [event["choices"][0] for event in events[:-1]]
        tokens = [token for choice in choices for token in (choice["logprobs"] or {}).get("content", ())]
        assert tokens == whole["logprobs"]["content"]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_full_queue_says_when_to_come_again():
    with Serving(max_queue=0) as serving:
        most = serving.generator.engine.scheduler.max_sequences_per_step
        bodies = [{"messages": LONG, "max_tokens": 10, "ignore_eos": True} for _ in range(most + 20)]
        refusals = 'pace:rejected_total{why="queue"} 20.0'
        with ThreadPoolExecutor(1) as clients:
            with by_hand(serving.generator):  # none ends before all have come
                asked = clients.submit(lambda: asyncio.run(ask_many(serving, bodies)))
                wait_until(lambda: refusals in serving.ask("/metrics").body.decode())
            replies = asked.result()
        refused = [data for status, data in replies if status == 429]
        assert len(refused) == 20 and b"rate_limit_exceeded" in refused[0]
        assert refusals in serving.ask("/metrics").body.decode()


def test_a_refusal_costs_no_parsing(monkeypatch):
    def unread(*arguments):
        raise AssertionError("a body was read")

    with Serving(max_queue=0) as serving:
        monkeypatch.setattr(serving.service.admission, "_max_requests", 0)
        monkeypatch.setattr("pace.server.endpoints.read_json", unread)
        reply = serving.chat()
        assert reply.status == 429 and reply.error["code"] == "rate_limit_exceeded"


@pytest.mark.alone
def test_health_answers_beside_the_engine():
    """Half of the answers come within 0.1 s, or on a busy machine within a tenth of the time that the engine works."""
    with Serving() as serving:
        worker = threading.Thread(
            target=lambda: asyncio.run(
                ask_many(serving, [{"messages": LONG, "ignore_eos": True, "max_tokens": 100}] * 64)
            )
        )
        worker.start()
        wait_until(lambda: serving.generator.engine.scheduler.running)
        times, start = [], time.perf_counter()
        while worker.is_alive():
            begin = time.perf_counter()
            assert serving.ask("/health").status == 200
            times.append(time.perf_counter() - begin)
            time.sleep(0.01)
        median, whole = statistics.median(times), time.perf_counter() - start
        assert median < max(0.1, whole / 10), f"{median:.3f} s in the median of {len(times)}; all took {whole:.1f} s"


def test_health_does_not_wait_for_a_step(own):
    forward, gate = own.generator.engine.model.forward, Gate()
    with own:
        own.generator.engine.model.forward = lambda batch: (gate(), forward(batch))[1]
        worker = threading.Thread(target=own.chat)
        worker.start()
        gate.wait_inside()
        assert own.ask("/health").status == own.ask("/live").status == 200
        gate.open()
        worker.join()


@pytest.fixture
def own():
    """A server for one test, which may break its engine."""
    generator = make_generator(kv_cache_bytes="32MiB")
    serving = Serving(generator)
    yield serving
    generator.driver.close()


def test_a_step_that_fails_once_fails_its_requests_alone(own):
    forward, failures = own.generator.engine.model.forward, [1]

    def spoilt(batch):
        if failures:
            failures.pop()
            raise RuntimeError("planted: /secret/path")
        return forward(batch)

    with own:
        own.generator.engine.model.forward = spoilt
        reply = own.chat()
        assert reply.status == 500 and reply.error["type"] == "server_error" and b"secret" not in reply.body
        own.check_well()


def test_an_engine_that_has_ended_is_unwell(own):
    def spoilt(batch):
        raise RuntimeError("planted")

    own.__enter__()
    own.generator.engine.model.forward = spoilt
    statuses = [own.chat().status for _ in range(3)]
    assert statuses[:2] == [500] * 2 and statuses[2] in (500, 503)  # the engine may have ended before the answer
    wait_until(lambda: own.ask("/health").status == 503)
    assert own.chat().status == 503
    assert own.ask("/v1/models").status == 200
    own.__exit__(RuntimeError)


def test_an_error_in_the_middle_of_a_stream_is_an_event(own):
    forward, calls = own.generator.engine.model.forward, []

    def spoilt(batch):
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("planted")
        time.sleep(0.01)
        return forward(batch)

    with own:
        own.generator.engine.model.forward = spoilt
        events = own.chat(LONG, stream=True, max_tokens=50).events
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-2]["error"]["type"] == "server_error" and events[-1] == "[DONE]"
        own.check_well()


def test_a_step_that_takes_long_is_told(own, monkeypatch):
    from pace.server.models import base

    monkeypatch.setattr(base, "STALL_SECONDS", 0.2)
    forward, gate = own.generator.engine.model.forward, Gate()
    with own:
        own.generator.engine.model.forward = lambda batch: (gate(), forward(batch))[1]
        worker = threading.Thread(target=own.chat)
        worker.start()
        gate.wait_inside()
        time.sleep(0.4)
        assert own.ask("/health").status == 503 and own.ask("/health").json["status"] == "unwell"
        assert own.ask("/live").status == 200
        gate.open()
        worker.join()
        assert own.ask("/health").status == 200
        own.check_well()


def test_sequences_that_do_not_fit_at_once_have_their_exact_texts():
    generator = make_generator(kv_cache_bytes="2MiB", prefix_cache_bytes=0)
    with Serving(generator) as serving:
        body = {"messages": LONG, "temperature": 0, "max_tokens": 80, "ignore_eos": True}
        alone = serving.chat(LONG, max_tokens=80, ignore_eos=True).json["choices"][0]["message"]["content"]
        replies = asyncio.run(ask_many(serving, [body] * 24))
        assert [status for status, _ in replies] == [200] * 24
        for _, data in replies:
            text = json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
            assert text == alone
    generator.driver.close()


def test_salts_keep_prompts_apart():
    generator = make_generator(kv_cache_bytes="32MiB")
    with Serving(generator) as serving:
        messages = [{"role": "user", "content": "A secret that is long enough to fill some blocks. " * 4}]

        def cached(**fields):
            return serving.chat(messages, max_tokens=1, **fields).json["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]

        assert cached(cache_salt="a") == 0 and cached(cache_salt="a") > 0
        assert cached(cache_salt="b") == 0 and cached() == 0
    generator.driver.close()


def test_a_request_of_many_prompts_lets_others_in_between():
    generator = make_generator(kv_cache_bytes="32MiB")
    with Serving(generator) as serving:
        done: list[str] = []

        def many() -> None:
            reply = serving.complete([[5 + number % 1000] * 150 for number in range(250)], max_tokens=2)
            assert reply.status == 200 and len(reply.json["choices"]) == 250
            assert reply.json["usage"]["prompt_tokens"] == 250 * 150
            done.append("many")

        worker = threading.Thread(target=many)
        worker.start()
        scheduler = serving.generator.engine.scheduler
        wait_until(lambda: scheduler.running)
        for _ in range(20):
            time.sleep(0.005)
            assert len(scheduler.waiting) + len(scheduler.running) <= scheduler.max_sequences_per_step
        serving.check_well()
        done.append("one")
        worker.join()
    assert done == ["one", "many"]
    generator.driver.close()
