"""Workers for what may take seconds, so that workers that prepare prompts need not wait: they compile grammars, and
decode images and sound."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from queue import PriorityQueue
from typing import Any

from pace.grammar import Grammar
from pace.llm.constraints.grammars import CompiledGrammar, GrammarCompiler
from pace.llm.processors.prompts import CountedMedia, MediaPartError, Prompt
from pace.server.errors import ApiError
from pace.server.limits import Limits

DECODERS = 2
"""Images and clips that are decoded at once. Decoding cannot be interrupted, and takes memory for all pixels."""
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


class MediaWorkers:
    """Threads that decode images and sound, and the bound on what is decoded. Used on the event loop only."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="pace-media")
        self._num_tokens = 0
        """Tokens of the media of requests in progress."""
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def prepared(self, prompts: list[Prompt]) -> AsyncIterator[None]:
        """Decodes the media of a request, which count until the block ends. Raises ApiError for media that cannot be
        decoded, and after the time limit."""
        media = [medium for prompt in prompts for medium in prompt.counted]
        num_tokens, num_taken = sum(medium.num_tokens for medium in media), 0
        has_begun = threading.Event()
        try:
            if media:
                try:
                    async with asyncio.timeout(self._limits.media_seconds):
                        await self._wait_for_room(num_tokens)
                        self._num_tokens += (num_taken := num_tokens)
                        await self._decode(media, has_begun)
                except TimeoutError:
                    raise self._too_long(media[0].part.where, has_begun.is_set()) from None
                except (ImportError, MediaPartError) as error:
                    place = getattr(error, "place", None) or media[0].part.where
                    raise ApiError(400, str(error), param=place) from None
            yield
        finally:
            self._num_tokens -= num_taken
            self._freed.set()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_room(self, num_tokens: int) -> None:
        while self._num_tokens and self._num_tokens + num_tokens > self._limits.media_tokens:
            self._freed.clear()
            await self._freed.wait()

    async def _decode(self, media: list[CountedMedia], has_begun: threading.Event) -> None:
        def decode(medium: CountedMedia) -> None:
            has_begun.set()
            _ = medium.prepared

        futures = [asyncio.wrap_future(self._pool.submit(decode, medium)) for medium in media]
        try:
            await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()

    def _too_long(self, place: str, has_begun: bool) -> ApiError:
        if not has_begun:
            message = f"{place}: images and sound of other requests are in the way; try again"
            return ApiError(503, message, param=place, headers={"retry-after": "5"})
        seconds = self._limits.media_seconds
        message = f"{place}: the images and sound of this request take more than {seconds:g} s to decode; send less"
        return ApiError(400, message, param=place)


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
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(compiler.compile(grammar))
                except BaseException as error:  # a panic in a Rust library is not an Exception
                    future.set_exception(error)
            del work, future, compiler, grammar  # not kept until the next grammar: the model may be unloaded
