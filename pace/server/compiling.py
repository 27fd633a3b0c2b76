"""Workers that compile grammars, which may take seconds, so that workers that prepare prompts need not wait."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from queue import PriorityQueue
from typing import Any

from pace.grammar import Grammar
from pace.llm.constraints.grammars import CompiledGrammar, GrammarCompiler
from pace.server.errors import ApiError
from pace.server.limits import Limits

LARGE_BYTES = 16 << 10
"""Compiling less takes about 0.1 s. Larger grammars wait separately, so that small ones never wait for them."""


class GrammarWorkers:
    """One thread for small grammars and one for large ones; each takes its shortest first. `compile` must be called on
    the event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small, self._large = _Worker("pace-grammars-small"), _Worker("pace-grammars-large")
        self._under_way: dict[str, _Work] = {}

    async def compile(self, compiler: GrammarCompiler, grammar: Grammar, param: str | None) -> CompiledGrammar:
        """`param` is the field that asks for the grammar. Raises what `GrammarCompiler.compile` does, and ApiError
        after the time limit. If the last request that waits for the grammar leaves, the work is cancelled, unless it
        has begun: then its result is kept."""
        if (found := compiler.find(grammar)) is not None:
            return found
        work = self._under_way.get(grammar.source)
        if work is None:
            worker = self._large if len(grammar.source) > LARGE_BYTES else self._small
            work = self._under_way[grammar.source] = _Work(worker.submit(compiler, grammar))
        work.num_waiting += 1
        try:
            return await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(work.future)), self._limits.grammar_seconds
            )
        except TimeoutError:
            if not work.future.running():
                message = "grammars of other requests are being compiled; try again"
                raise ApiError(503, message, param=param, headers={"retry-after": "5"}) from None
            raise ApiError(
                400,
                f"this grammar takes more than {self._limits.grammar_seconds:g} s to compile; simplify it",
                param=param,
                code="grammar_too_complex",
            ) from None
        finally:
            work.num_waiting -= 1
            if not work.num_waiting:
                work.future.cancel()
                if self._under_way.get(grammar.source) is work:
                    del self._under_way[grammar.source]

    def close(self) -> None:
        self._small.close()
        self._large.close()


@dataclass
class _Work:
    future: Future[CompiledGrammar]
    num_waiting: int = 0


class _Worker:
    """A thread, started with the first work, that compiles the shortest waiting grammar first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: PriorityQueue[tuple[int, int, Any]] = PriorityQueue()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def submit(self, compiler: GrammarCompiler, grammar: Grammar) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        self._queue.put((len(grammar.source), next(self._order), (future, compiler, grammar)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Ends the thread after its current work."""
        self._queue.put((-1, -1, None))

    def _run(self) -> None:
        while (work := self._queue.get()[2]) is not None:
            future, compiler, grammar = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(compiler.compile(grammar))
            except BaseException as error:  # a panic in a Rust library is not an Exception
                future.set_exception(error)
