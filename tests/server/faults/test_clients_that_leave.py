"""Connections that close at any stage: their resources are freed at once, and other clients get their exact text."""

from __future__ import annotations

import itertools
import socket
import time

import pytest

from tests.server.serving import LONG, Serving, make_generator, request_bytes

ENDLESS = {"messages": LONG, "ignore_eos": True, "temperature": 0}


def start(serving: Serving, **fields) -> socket.socket:
    """Starts a request that would run for a long time."""
    connection = serving.connect()
    connection.sendall(request_bytes("/v1/chat/completions", ENDLESS | fields))
    return connection


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def slow():
    """A server whose steps take 20 ms, so that connections close in the middle of a request."""
    generator = make_generator(kv_cache_bytes="32MiB")
    forward = generator.engine.model.forward

    def slowed(batch):
        time.sleep(0.02)
        return forward(batch)

    generator.engine.model.forward = slowed
    with Serving(generator) as serving:
        yield serving
    generator.driver.close()


AT_ONCE = 1.0
"""Seconds, the time of 50 steps: an answer that continues takes 400 steps and more."""


@pytest.mark.alone
@pytest.mark.parametrize("how", ["close", "reset"])
def test_its_blocks_are_free_at_once(slow, how, subtests):
    for stream, delay in itertools.product([True, False], [0.0, 0.01, 0.05, 0.2]):
        with subtests.test(stream=stream, delay=delay):
            connection = start(slow, stream=stream)
            time.sleep(delay)
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
            slow.check_idle(AT_ONCE)


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
def test_one_that_sends_no_more_and_goes_later(slow, stream):
    connection = start(slow, stream=stream)
    connection.shutdown(socket.SHUT_WR)
    time.sleep(0.1)
    assert slow.service.admission.num_requests == 1
    connection.close()
    slow.check_idle(AT_ONCE)


def test_others_go_on_with_their_own_text(slow):
    alone = slow.chat(max_tokens=20).json["choices"]
    leavers = [start(slow, stream=True) for _ in range(8)]
    time.sleep(0.1)
    connection = slow.connect()
    connection.sendall(
        request_bytes("/v1/chat/completions", {"messages": LONG, "temperature": 0, "max_tokens": 20, "stream": False})
    )
    for leaver in leavers:
        leaver.close()
    from tests.server.serving import read_reply

    with connection:
        reply = read_reply(connection)
    assert reply.json["choices"] == slow.chat(LONG, max_tokens=20).json["choices"]
    assert alone == slow.chat(max_tokens=20).json["choices"]


def test_one_that_waits_in_the_queue(slow):
    cap = 2 * slow.generator.engine.scheduler.max_sequences_per_step
    busy = start(slow, stream=True, n=cap, temperature=1)
    wait_until(lambda: slow.service.admission.num_requests == 1)
    time.sleep(0.1)
    waiting = start(slow)
    wait_until(lambda: slow.service.admission.num_waiting == 1)
    waiting.close()
    wait_until(lambda: slow.service.admission.num_waiting == 0)
    busy.close()
    slow.check_idle()


def test_it_is_counted(slow):
    def count() -> float:
        page = slow.ask("/metrics").body.decode()
        return float(next(line for line in page.splitlines() if line.startswith("pace:client_gone_total")).split()[1])

    before = count()
    connection = start(slow, stream=True)
    time.sleep(0.1)
    connection.close()
    wait_until(lambda: count() == before + 1)
