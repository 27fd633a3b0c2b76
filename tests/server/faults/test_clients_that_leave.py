"""Connections that close at any stage: their resources are freed at once, and other clients get their exact text."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.serving import LONG, Serving, make_generator, read_reply, request_bytes
from tests.waiting import wait_until

ENDLESS = {"messages": LONG, "ignore_eos": True, "temperature": 0}


def start(serving: Serving, **fields) -> socket.socket:
    """Starts a request that would run for a long time."""
    connection = serving.connect()
    connection.sendall(request_bytes("/v1/chat/completions", ENDLESS | fields))
    return connection


@pytest.fixture(scope="module")
def slow():
    """A server whose steps take 20 ms, so that connections close in the middle of a request."""
    generator = make_generator(kv_cache_bytes="32MiB")
    forward = generator.engine.model.forward

    def slowed(batch):
        serving.num_steps += 1
        time.sleep(0.02)
        return forward(batch)

    generator.engine.model.forward = slowed
    with Serving(generator) as serving:
        serving.num_steps = 0
        yield serving
    generator.driver.close()


@contextmanager
def frees_at_once(serving: Serving) -> Iterator[None]:
    """Checks that what a block leaves takes less than 50 steps. An answer that continues takes 400 and more."""
    before = serving.num_steps
    yield
    serving.check_idle()
    assert serving.num_steps - before < 50, f"{serving.num_steps - before} steps after the client had left"


@pytest.mark.parametrize("how", ["close", "reset"])
def test_its_blocks_are_free_at_once(slow, how, subtests):
    for stream, delay in itertools.product([True, False], [0.0, 0.01, 0.05, 0.2]):
        with subtests.test(stream=stream, delay=delay):
            connection = start(slow, stream=stream)
            time.sleep(delay)
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with frees_at_once(slow):
                connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_one_that_sends_no_more_and_goes_later(slow, stream):
    connection = start(slow, stream=stream)
    connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: slow.service.admission.num_requests == 1)
    time.sleep(0.1)
    assert slow.service.admission.num_requests == 1
    with frees_at_once(slow):
        connection.close()


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
    wait_until(lambda: slow.service.admission.num_requests == 1)
    connection.close()
    wait_until(lambda: count() == before + 1)
