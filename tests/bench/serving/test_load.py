"""A load on a scripted server: the requests and their times, and the measured numbers for known delays."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import numpy
import pytest
from pytest import approx

from pace.bench.serving import metrics
from pace.bench.serving.http import Address, Client
from pace.bench.serving.record import Record
from pace.bench.serving.run import find_model, run, warm_up
from pace.bench.serving.workload import Load, common_words
from tests.bench.serving.scripted_server import (
    CLOSE,
    END,
    HEAD,
    JumpingClock,
    chunk,
    event,
    serving,
    stream,
    text,
    usage,
    whole,
)  # fmt: skip


def measure(load: Load, answer, timeout: float = 10.0, **options):
    """Returns the server, the run, and its summary. Times are those of a `JumpingClock`."""

    async def talk():
        async with serving(answer) as server:
            client = Client(Address.parse(server.url))
            result = await run(client, load, load.bodies("m"), timeout)
            client.close()
            return server, result

    server, result = JumpingClock().run(talk())
    return server, result, metrics.summary(result, load, "m", list(metrics.METRICS), [50.0, 99.0], **options)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_a_load_is_made_from_its_seed():
    load = Load(num_prompts=200, input_len=20, output_len=10, range_ratio=0.5, request_rate=50.0, seed=3)
    again, other = replace(load), replace(load, seed=4)
    assert load.arrivals() == again.arrivals() != other.arrivals()
    assert load.bodies("m") == again.bodies("m") != other.bodies("m")
    assert load.bodies("m") == replace(load, request_rate=99.0).bodies("m")

    bodies = [json.loads(body) for body in load.bodies("m", num_warmups=5)]
    lengths = [len(body["prompt"].split()) for body in bodies]
    assert (min(lengths), max(lengths)) == (10, 30) and len(bodies) == 205
    assert {body["max_tokens"] for body in bodies} == set(range(5, 16))
    assert len({body["prompt"].split()[0] for body in bodies}) > 100
    assert {word for body in bodies for word in body["prompt"].split()} <= set(common_words())


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for(burstiness):
    gaps = numpy.diff(Load(num_prompts=20_000, request_rate=8.0, burstiness=burstiness).arrivals())
    assert gaps.mean() == approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == approx(burstiness**-0.5, rel=0.05)


def test_bodies():
    body = json.loads(Load(num_prompts=1, output_len=5).bodies("m")[0])
    assert len(body.pop("prompt").split()) == 128
    assert body == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat = Load(1, endpoint="/v1/chat/completions", ignore_eos=True, extra_body={"temperature": 1, "top_k": 3})
    body = json.loads(chat.bodies("m")[0])
    assert [message["role"] for message in body["messages"]] == ["user"] and "prompt" not in body
    assert body["ignore_eos"] is True and body["temperature"] == 1 and body["top_k"] == 3


@pytest.mark.parametrize(
    "wrong",
    [{"num_prompts": 0}, {"range_ratio": 1.0}, {"request_rate": 0.0}, {"request_rate": math.nan}, {"burstiness": 0.0},
     {"max_concurrency": 0}, {"seed": -1}, {"endpoint": "/v1/embeddings"}],
)  # fmt: skip
def test_loads_that_are_none(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Load(**wrong)


# -- what is measured --------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_server():
    load = Load(num_prompts=6, request_rate=50.0)
    _, _, numbers = measure(load, lambda index, body: stream(5, first=0.1, gap=0.04))
    assert numbers["completed"] == 6 and numbers["failed"] == 0
    assert numbers["total_input_tokens"] == 42 and numbers["total_output_tokens"] == 30
    assert numbers["median_ttft_ms"] == approx(100)
    assert numbers["median_itl_ms"] == approx(40)
    assert numbers["mean_tpot_ms"] == approx(40)
    assert numbers["median_e2el_ms"] == approx(260)
    duration = numbers["duration"]
    assert numbers["output_throughput"] == approx(30 / duration)
    assert numbers["total_token_throughput"] == approx(72 / duration)
    assert numbers["request_throughput"] == approx(6 / duration)


def test_tokens_are_the_servers_count_and_not_the_pieces_of_text():
    def answer(index, body):
        yield 0, HEAD + chunk(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        yield 0.1, chunk(event({"choices": [{"index": 0, "delta": {"content": "four tokens"}}], "usage": None}))
        yield 0.09, chunk(event({"choices": [{"index": 0, "delta": {"content": "six more"}}]}))
        yield 0.2, chunk(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
        yield 0.4, chunk(usage(3, 10)) + END

    load = Load(num_prompts=1, endpoint="/v1/chat/completions")
    _, result, numbers = measure(load, answer)
    assert numbers["total_output_tokens"] == 10 and len(result.records[0].arrivals) == 2
    assert numbers["mean_ttft_ms"] == approx(100)  # a chunk with only a role has no text
    assert numbers["mean_itl_ms"] == approx(90)
    assert numbers["mean_tpot_ms"] == approx(290 / 9)  # the last tokens had no text
    assert numbers["mean_e2el_ms"] == approx(390)  # until the end of the answer, not of the stream


def test_an_open_loop_counts_from_when_a_request_was_due():
    """Three requests are due nearly at once, but the client sends them in turn: each waits for those before it."""
    load = Load(num_prompts=3, request_rate=1000.0, max_concurrency=1)
    _, result, numbers = measure(load, lambda index, body: stream(1, first=0.1, gap=0))
    waits = [0.1 * (i + 1) + load.arrivals()[0] - due for i, due in enumerate(load.arrivals())]
    assert [record.ttft for record in result.records] == approx(waits)
    assert numbers["max_concurrent_requests"] == 1


def test_a_closed_loop_counts_from_when_a_request_was_sent():
    load = Load(num_prompts=6, max_concurrency=2)
    server, result, numbers = measure(load, lambda index, body: stream(1, first=0.1, gap=0))
    assert [1e3 * record.ttft for record in result.records] == [approx(100)] * 6
    assert 1e3 * numbers["duration"] == approx(300) and numbers["max_concurrent_requests"] == 2
    assert server.num_connections == 2  # used again


def test_requests_are_sent_when_they_are_due():
    load = Load(num_prompts=20, request_rate=100.0)
    _, result, numbers = measure(load, lambda index, body: stream(1, first=0, gap=0))
    assert [record.due - result.start for record in result.records] == approx(load.arrivals())
    assert numbers["max_send_lag_ms"] == approx(0, abs=1e-3)


def test_goodput_counts_requests_that_meet_every_goal():
    """One of four answers begins late, and one comes slowly."""

    def answer(index, body):
        return stream(3, first=0.2 if index == 1 else 0.02, gap=0.12 if index == 2 else 0.02)

    load = Load(num_prompts=4)
    for goal, good in ({"ttft": 100.0}, 3), ({"tpot": 70.0}, 3), ({"ttft": 100.0, "tpot": 70.0}, 2), ({}, None):
        numbers = measure(load, answer, goodput=goal)[2]
        found = numbers["request_goodput"]
        assert found == (good and approx(good / numbers["duration"]))


def test_distributions():
    load, records = Load(num_prompts=4), []
    for end in (1.0, 2.0, 3.0, 4.0):
        record = Record(10.0)
        record.arrivals, record.output_tokens = [10.5, 10.0 + end], 6
        record.last = record.ended = 10.0 + end
        records.append(record)
    records[0].output_tokens = 1  # has no time between tokens
    result = metrics.Run(records, 10.0, 4.0, 0.0)
    numbers = metrics.summary(result, load, "m", ["e2el", "tpot"], [50.0, 75.0, 99.9])
    assert numbers["mean_e2el_ms"] == 2500 and numbers["median_e2el_ms"] == 2500
    assert numbers["std_e2el_ms"] == approx(1118.034) and numbers["p75_e2el_ms"] == 3250
    assert numbers["mean_tpot_ms"] == approx((300 + 500 + 700) / 3) and "p99.9_tpot_ms" in numbers
    assert "mean_ttft_ms" not in numbers
    assert numbers["max_concurrent_requests"] == 4


# -- what goes wrong ---------------------------------------------------------------------------------------------------

FAILING = {
    "HTTP 429": [(0, whole(429, {"error": {"message": "too many"}}))],
    "error event": [(0, HEAD + chunk(text("a")) + chunk(event({"error": {"message": "the model fell"}})) + END)],
    "dropped": [(0, HEAD + chunk(text("a"))), (0, CLOSE)],
    "no usage": [(0, HEAD + chunk(text("a")) + chunk(b"data: [DONE]\n\n") + END)],
    "malformed": [(0, HEAD + chunk(b"data: {no\n\n") + END)],
    "timeout": [(0, HEAD + chunk(text("a"))), (1.5, b"")],
}


def test_failures_are_counted_by_kind_and_kept_out_of_the_numbers():
    kinds = list(FAILING)
    bad = [{"usage": 5}, {"choices": [3]}, [], {"choices": [], "usage": {"prompt_tokens": 1}}]

    def answer(index, body):
        if index < len(kinds):
            return FAILING[kinds[index]]
        if index < len(kinds) + len(bad):
            return [(0, HEAD + chunk(event(bad[index - len(kinds)])) + END)]
        return stream(2, first=0.1, gap=0.1)

    load = Load(num_prompts=len(kinds) + len(bad) + 1, request_rate=100.0)
    _, result, numbers = measure(load, answer, timeout=1.0)
    assert numbers["failures"] == dict.fromkeys(kinds, 1) | {"malformed": 1 + len(bad)}
    assert numbers["completed"] == 1 and numbers["failed"] == len(load.arrivals()) - 1
    assert numbers["total_output_tokens"] == 2 and numbers["mean_ttft_ms"] == approx(100)
    messages = metrics.details(result)["errors"]
    assert "too many" in messages and "the model fell" in messages and messages.count("") == 1


def test_a_server_that_is_not_there_is_a_failure_of_every_request():
    async def talk():
        client = Client(Address.parse("http://127.0.0.1:1"))
        with pytest.raises(ConnectionError, match="no answer"):
            await find_model(client)
        return await run(client, load, load.bodies("m"), 5.0)

    load = Load(num_prompts=2)
    numbers = metrics.summary(asyncio.run(talk()), load, "m", ["ttft"], [99.0])
    assert numbers["failures"] == {"refused": 2} and numbers["mean_ttft_ms"] is None


def test_a_request_that_fails_first_says_why():
    async def talk():
        async with serving(lambda *_: [(0, whole(401, {"error": {"message": "a key, please"}}))]) as server:
            client = Client(Address.parse(server.url))
            with pytest.raises(ValueError, match=r"v1/models: 401: a key, please"):
                await find_model(client)
            with pytest.raises(ValueError, match=r"first request failed \(HTTP 401\): a key, please"):
                await warm_up(client, Load(1), Load(1).bodies("m"), 5.0)
            client.close()

    asyncio.run(talk())
