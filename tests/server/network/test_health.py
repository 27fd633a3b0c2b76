"""Health probes: the process is alive, a model answers, new requests are accepted."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.serving import QUESTION, Serving
from tests.waiting import PATIENCE

PROBES = ("/live", "/health", "/ready")


def statuses(serving: Serving) -> list[int]:
    for path in PROBES:  # HEAD is GET without a body
        head = serving.ask(path, method="HEAD")
        assert (head.status, head.body) == (serving.ask(path).status, b"")
    return [serving.ask(path).status for path in PROBES]


@pytest.fixture
def own():
    with Serving(keys=("key",)) as serving:  # probes need no key
        yield serving
        serving.service.status = "ready"


def test_a_model_that_is_ready(own):
    assert statuses(own) == [200, 200, 200]
    assert [own.ask(path).json["status"] for path in PROBES] == ["alive", "ok", "ready"]


@pytest.mark.parametrize("status", ["loading", "failed"])
def test_without_a_model_nothing_but_the_process_is_well(own, status):
    own.service.status = status
    assert statuses(own) == [200, 503, 503]
    health = own.ask("/health")
    assert health.json["status"] == status
    assert health.error["type"] == "unavailable_error" and "load" in health.error["message"]
    assert ("retry-after" in health.headers) == (status == "loading")
    asked = own.ask("/v1/chat/completions", {"messages": QUESTION}, Authorization="Bearer key")
    assert asked.status == 503 and asked.error["message"] == health.error["message"]


def test_a_server_that_drains_is_well_and_takes_nothing(own):
    asyncio.run_coroutine_threadsafe(own.service.drain(0), own.loop).result(PATIENCE)
    assert statuses(own) == [200, 200, 503]
    assert own.ask("/health").json == {"status": "ok"}
