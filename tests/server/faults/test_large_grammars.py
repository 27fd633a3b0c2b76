"""Grammars that take long to compile delay no other request, and their compilation is abandoned in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pace.llm.constraints import grammars
from pace.server.workers import LARGE_BYTES
from tests.server.serving import QUESTION, Serving, make_generator, request_bytes
from tests.waiting import PATIENCE, wait_until


def large(number: int, count: int = 2000) -> dict:
    names = [f"property {number} {index}" for index in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, {"type": "null"}), "required": names}


class Gate:
    """Delays the compilation of large grammars until it is opened."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        self.begun: list[int] = []
        """Lengths of the grammars for which compilation has begun."""

    def compile(self, grammar, table):
        if len(grammar.source) > LARGE_BYTES:
            self.begun.append(len(grammar.source))
            assert self.opens.wait(PATIENCE)
        return self.compile_now(grammar, table)


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    gate = Gate()
    gate.compile_now = grammars._compile
    monkeypatch.setattr(grammars, "_compile", gate.compile)
    yield gate
    gate.opens.set()


@pytest.fixture(scope="module")
def generator():
    generator = make_generator(kv_cache_bytes="16MiB")
    yield generator
    generator.driver.close()


class Asking:
    """A request that runs in a thread."""

    def __init__(self, serving: Serving, **fields) -> None:
        self._thread = threading.Thread(target=lambda: setattr(self, "reply", serving.chat(max_tokens=3, **fields)))
        self._thread.start()

    def wait(self):
        self._thread.join(PATIENCE)
        return self.reply


def test_others_are_answered_while_large_schemas_are_compiled(generator, gate) -> None:
    with Serving(generator) as serving:
        held = [Asking(serving, guided_json=large(number)) for number in range(3)]
        wait_until(lambda: gate.begun)
        assert serving.chat(max_tokens=3).status == 200
        assert serving.chat(guided_json={"type": "object", "properties": {"a": {}}}, max_tokens=3).status == 200
        assert serving.chat(guided_choice=["yes", "no"], max_tokens=3).status == 200
        assert serving.ask("/tokenize", {"prompt": "abc"}).status == 200
        assert len(gate.begun) == 1 and not gate.opens.is_set()
        gate.opens.set()
        assert [asking.wait().status for asking in held] == [200] * 3, [asking.reply.status for asking in held]


def test_one_that_takes_too_long_is_given_up_and_kept(generator, gate) -> None:
    with Serving(generator, grammar_seconds=20.0) as serving:
        first = Asking(serving, guided_json=large(8))
        wait_until(lambda: gate.begun)
        second = Asking(serving, guided_json=large(3))
        wait_until(lambda: len(serving.service._grammar_workers._under_way) == 2)
        serving.pass_time(20.0)
        reply = first.wait()
        assert reply.status == 400 and reply.error["code"] == "grammar_too_complex", reply.body
        assert "takes more than 20 s" in reply.error["message"] and reply.error["param"] == "guided_json"
        reply = second.wait()
        assert reply.status == 503 and "retry-after" in reply.headers and "other requests" in reply.error["message"]
        gate.opens.set()
        assert serving.chat(guided_json=large(8), max_tokens=3).status == 200
        assert len(gate.begun) == 1, "what nobody waited for any more was not begun, and what had begun was kept"


def test_one_grammar_is_compiled_once_and_short_ones_come_first(generator, gate) -> None:
    with Serving(generator) as serving:
        first = Asking(serving, guided_json=large(4))
        wait_until(lambda: gate.begun)
        workers = serving.service._grammar_workers
        others = [Asking(serving, guided_json=large(5, count)) for count in (1800, 1500, 1800, 1000)]
        wait_until(lambda: sum(work.num_waiting for work in workers._under_way.values()) == 5)
        gate.opens.set()
        assert [asking.wait().status for asking in (first, *others)] == [200] * 5
        assert len(gate.begun) == 4 and gate.begun[1:] == sorted(gate.begun[1:])


def test_a_client_that_leaves_gives_its_grammar_up(generator, gate) -> None:
    with Serving(generator) as serving:
        first = Asking(serving, guided_json=large(6))
        wait_until(lambda: gate.begun)
        connection = serving.connect()
        connection.sendall(request_bytes("/v1/chat/completions", {"messages": QUESTION, "guided_json": large(7)}))
        workers = serving.service._grammar_workers
        wait_until(lambda: len(workers._under_way) == 2)
        connection.close()
        wait_until(lambda: len(workers._under_way) == 1)
        gate.opens.set()
        assert first.wait().status == 200 and len(gate.begun) == 1
