"""`serve run pace.integrations.ray:app` with two replicas: the answers of `pace serve`, conversations on the replica
that has them cached, and the death of a replica."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import pytest
from ray import serve

from pace.assets import TINY
from pace.integrations.ray import app as application
from pace.llm import LLMModel, SamplingConfig
from tests.integrations.ray.cluster import processes, wait_until
from tests.server.serving import ANSWER, QUESTION, Reply, request_bytes, text_of

pytestmark = pytest.mark.thorough

ENGINE, INGRESS = "ServeReplica:default:engine", "ServeReplica:default:ingress"
PROMPT = "Once upon a time"
LONG = {"prompt": PROMPT, "temperature": 0, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_text():
    with LLMModel(TINY, progress=False) as model:
        config = SamplingConfig(max_new_tokens=LONG["max_tokens"], ignore_eos=True)
        return model.generate(PROMPT, config).texts[0]


# -- as pace serve -----------------------------------------------------------------------------------------------------


def test_each_form_is_answered(app):
    assert app.chat(QUESTION)["choices"][0]["message"]["content"] == ANSWER
    assert app.complete("1, 2, 3,", max_tokens=5)["choices"][0]["text"] == " 4, 5, 6"
    for path, field in (("/v1/messages", "content"), ("/v1/responses", "output")):
        body = {"max_tokens": 30, "messages": QUESTION} if field == "content" else {"input": QUESTION[0]["content"]}
        status, _, answer = app.ask(path, {"temperature": 0, "model": "tiny", **body})
        assert status == 200 and ANSWER in answer.decode(), answer
    for path in ("/live", "/health", "/ready", "/limits", "/version", "/v1/models", "/openapi.json", "/"):
        assert app.ask(path)[0] == 200


def test_a_stream_comes_piece_by_piece_and_ends_whole(app, long_text):
    with socket.create_connection(("127.0.0.1", app.port), 60) as connection:
        connection.sendall(request_bytes("/v1/completions", {**LONG, "stream": True}))
        chunks = []
        while chunk := connection.recv(1 << 20):
            chunks.append(chunk)
    assert len(chunks) > 10
    body = b"".join(chunks).partition(b"\r\n\r\n")[2].decode()
    events = Reply(200, {}, "".join(line + "\n" for line in body.split("\r\n")).encode()).events
    assert text_of(events) == long_text and events[-1] == "[DONE]"


def test_what_is_wrong_is_said_as_pace_serve_says_it(app):
    status, headers, body = app.ask("/v1/chat/completions", {"messages": QUESTION, "temperature": "hot"})
    assert status == 400 and json.loads(body)["error"]["param"] == "temperature" and headers["x-request-id"]
    assert app.ask("/v1/completions", b"[")[0] == 400
    assert app.ask("/nowhere", {})[0] == 404
    assert app.ask("/v1/completions", b" " * (5 << 20))[0] == 413
    assert app.ask("/v1/models", host="evil.example")[0] == 403
    status, _, body = app.ask("/v1/messages", {"max_tokens": 3, "messages": []})
    assert status == 400 and json.loads(body)["type"] == "error"


def test_a_client_that_leaves_frees_its_place(app):
    def num_running() -> float:
        return sum(app.metric("pace:num_requests_running").values())

    gone = sum(app.metric("pace:client_gone_total").values())
    connections = []
    for _ in range(4):
        connection = socket.create_connection(("127.0.0.1", app.port), 60)
        connection.sendall(request_bytes("/v1/completions", {**LONG, "n": 16, "stream": True}))
        connection.recv(1)
        connections.append(connection)
    for connection in connections:
        connection.close()
    wait_until(lambda: num_running() == 0, 10)
    assert sum(app.metric("pace:client_gone_total").values()) > gone


# -- which replica -----------------------------------------------------------------------------------------------------


def test_conversations_stay_where_their_beginning_is_known(app):
    """Each turn finds all earlier turns in its replica's cache, and both replicas have work."""
    before = app.metric("pace:prompt_tokens_total")
    missed = []

    def converse(number: int) -> None:
        messages = [{"role": "user", "content": f"Tell me a story about {number} foxes."}]
        known = 0
        for _ in range(4):
            answer = app.chat(messages, max_tokens=24)
            if answer["usage"]["prompt_tokens_details"]["cached_tokens"] < known // 16 * 16:
                missed.append(number)
            known = answer["usage"]["prompt_tokens"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            messages[-2] = {"role": "assistant", "content": messages[-2]["content"]}

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(converse, range(64)))
    after = app.metric("pace:prompt_tokens_total")
    work = [after[replica] - before[replica] for replica in after]
    assert len(missed) <= 64 * 3 * 0.03, f"{len(missed)} of 192 turns were computed anew"
    assert len(work) == 2 and min(work) > 0.2 * sum(work), work


def test_requests_that_all_begin_alike_are_spread_under_load(app):
    before = app.metric("pace:generation_tokens_total")
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda _: app.complete(PROMPT, max_tokens=100, ignore_eos=True), range(64)))
    after = app.metric("pace:generation_tokens_total")
    work = [after[replica] - before[replica] for replica in after]
    assert len(work) == 2 and min(work) > 0.2 * sum(work), work


# -- a replica dies ----------------------------------------------------------------------------------------------------


def outcome(app, stream: bool, text: str) -> str:
    """Outcome of a request that keeps an engine busy: "whole", "error", "closed", or a text that must never occur."""
    body = {**LONG, "n": 4 if stream else 16, "stream": stream}
    try:
        reply = Reply(*app.ask("/v1/completions", body))
    except (OSError, HTTPException):  # including a missing length or last chunk
        return "closed"
    if reply.status != 200:
        return "error" if reply.status == 503 and reply.error["message"] else f"status {reply.status}"
    if not stream:
        return "whole" if reply.json["choices"][0]["text"] == text else "wrong"
    if any("error" in event for event in reply.events if event != "[DONE]"):
        return "error" if text.startswith(text_of(reply.events)) and reply.events[-1] != "[DONE]" else "wrong"
    return "whole" if text_of(reply.events) == text and reply.events[-1] == "[DONE]" else "cut off"


def test_a_replica_killed_under_load_loses_nothing_silently(app, long_text):
    replicas, first = app.replicas, processes(ENGINE)
    assert len(replicas) == len(first) == 2
    outcomes: list[str] = []
    killed = threading.Event()

    def load(number: int) -> list[str]:
        """Adds outcomes until the replica is dead. Returns those of three requests that begin afterwards."""
        while not killed.is_set():
            outcomes.append(outcome(app, number % 2 == 0, long_text))
        time.sleep(1)
        return [outcome(app, number % 2 == 0, long_text) for _ in range(3)]

    with ThreadPoolExecutor(12) as threads:
        later = threads.map(load, range(12))
        wait_until(lambda: "whole" in outcomes and min(app.metric("pace:num_requests_running").values()) > 0)
        os.kill(first[0], signal.SIGKILL)
        killed.set()
        later = [one for own in later for one in own]
    assert set(outcomes) <= {"whole", "error", "closed"}, outcomes
    assert "error" in outcomes and "whole" in outcomes, outcomes
    assert set(later) == {"whole"}, later
    wait_until(lambda: len(app.replicas) == 2)
    assert len(app.replicas & replicas) == 1 and first[1] in processes(ENGINE)


def test_an_ingress_killed_under_load_loses_nothing_silently(app, long_text):
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(outcome, app, number % 2 == 0, long_text) for number in range(64)]
        time.sleep(0.5)
        os.kill(processes(INGRESS)[0], signal.SIGKILL)
        outcomes = {future.result() for future in futures}
    assert outcomes <= {"whole", "error", "closed", "status 500"}, outcomes
    wait_until(app.is_ready)
    assert outcome(app, True, long_text) == "whole"


def test_a_replica_that_is_removed_finishes_what_it_has(app, long_text):
    stopped = threading.Event()

    def load(number: int) -> set[str]:
        outcomes = set()
        while not stopped.is_set():
            outcomes.add(outcome(app, number % 2 == 0, long_text))
        return outcomes

    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(load, number) for number in range(8)]
        serve.run(application({"num_replicas": 1, "num_threads": 1, "kv_cache_bytes": "64MiB"}))
        wait_until(lambda: len(processes(ENGINE)) == 1)
        stopped.set()
    assert set.union(*(one.result() for one in loads)) == {"whole"}


def test_an_engine_that_is_stuck_is_replaced():
    """`check_health` makes the same check as /health. Ray replaces a replica if it raises."""
    from pace.integrations.ray.replica import Replica

    class Stuck:
        why_unwell = "a step has taken 61 s so far"

        def close(self) -> None:
            pass

    replica = Replica.__new__(Replica)
    replica._service = Stuck()
    with pytest.raises(RuntimeError, match="61 s"):
        replica.check_health()
