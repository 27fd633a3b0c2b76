"""Runs honest and faulty clients at random for a given time: no honest client may ever get a wrong text.

    python -m tests.server.faults.soak --seconds 3600 [--honest 64] [--seed 1]

`tests.server.faults.media_soak` takes the same options; its clients also send images and sound.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from pace.llm.generator import Generator
from pace.memory import resident_bytes
from tests.server.serving import Serving, make_generator, request_bytes, text_of

PROMPTS = [
    "What is the capital of France?", "Tell me a story about a fox.", "Count from one to ten.", "What is 17 plus 25?",
    "Say hello twice.",
]  # fmt: skip
STYLES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 1.2, "seed": 7, "max_tokens": 40},
    {"temperature": 0, "max_tokens": 60, "stop": ["."]},
    {"temperature": 0.8, "seed": 3, "top_p": 0.8, "max_tokens": 25},
]
FAULT_SECONDS = 120
"""A server on a busy machine answers later than this only if it does not answer at all."""
MORE_SECONDS = 100.0
"""Longest extra time until all clients together have done enough."""
NUM_SAMPLES = 10
"""How often the memory of the process is noted, from the warm-up to the end."""


class Soak:
    """One server, many clients."""

    def __init__(self, serving: Serving, seed: int) -> None:
        self.serving = serving
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[Any, str, str]] = []
        self.questions = self.make_questions()
        self.references: dict[tuple[int, int], str] = {}
        self.memory: list[int] = []
        """Resident bytes over time."""

    def make_questions(self) -> list[Any]:
        """The contents of the user's turn that clients ask about."""
        return list(PROMPTS)

    @property
    def faults(self) -> tuple[Callable[[Any], Awaitable[None]], ...]:
        return FAULTS

    async def learn(self) -> None:
        """Asks every question in every style, one after another. Each must give the text that it gave before."""
        for question in range(len(self.questions)):
            for style in range(len(STYLES)):
                text = await self._text(question, style, False)
                self._check(question, style, self.references.setdefault((question, style), text), text)

    def check_idle(self) -> None:
        """Waits until no request is running. Raises AssertionError if the server holds what it should not."""
        self.serving.check_idle()

    async def run(
        self, seconds: float, num_honest: int, num_faulty: int, enough: Callable[[], bool] = lambda: True
    ) -> None:
        """Runs for `seconds`, or on a busy machine longer, until `enough()`."""
        begin, self.memory = time.monotonic(), []
        is_over = lambda: time.monotonic() - begin >= (seconds if enough() else seconds + MORE_SECONDS)
        honest = [self._repeat(self._honest, is_over) for _ in range(num_honest)]
        faulty = [self._repeat(self._faulty, is_over) for _ in range(num_faulty)]
        await asyncio.gather(*honest, *faulty, self._watch(begin, seconds))

    async def _watch(self, begin: float, seconds: float) -> None:
        for number in range(NUM_SAMPLES):
            await asyncio.sleep(max(0.0, begin + seconds * number / NUM_SAMPLES - time.monotonic()))
            self.memory.append(resident_bytes())

    async def _repeat(self, action: Callable[[], Awaitable[None]], is_over: Callable[[], bool]) -> None:
        while not is_over():
            await action()

    async def _honest(self) -> None:
        question, style = self.random.randrange(len(self.questions)), self.random.randrange(len(STYLES))
        text = await self._text(question, style, self.random.random() < 0.7)
        self.counts["honest"] += 1
        self._check(question, style, self.references[question, style], text)

    def _check(self, question: int, style: int, expected: str, text: str) -> None:
        if text != expected or text.startswith("status"):
            self.wrong.append(((question, style), text, expected))

    def body(self, content: Any, **fields: Any) -> bytes:
        """A request about the content of one user turn."""
        return request_bytes("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    async def _text(self, question: int, style: int, stream: bool) -> str:
        while True:
            status, data = await self._ask(self.body(self.questions[question], stream=stream, **STYLES[style]))
            if status != 429:
                break
            self.counts["turned away"] += 1
            await asyncio.sleep(0.2)
        if status != 200:
            return f"status {status}: {data[:200]!r}"
        if not stream:
            return json.loads(data)["choices"][0]["message"]["content"]
        lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
        return text_of([line if line == "[DONE]" else json.loads(line) for line in lines])

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.serving.port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            body = b""
            if b"transfer-encoding: chunked" in head.lower():
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    body += await reader.readexactly(size)
                    await reader.readexactly(2)
            else:
                body = await reader.read()
            return int(head.split()[1]), body
        finally:
            writer.close()

    async def _faulty(self) -> None:
        fault = self.random.choice(self.faults)
        self.counts[fault.__name__] += 1
        try:
            await asyncio.wait_for(fault(self), FAULT_SECONDS)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    async def _open(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.serving.port)
        writer.write(data)
        return reader, writer

    def _endless(self, **fields: Any) -> bytes:
        return self.body(self.random.choice(self.questions), ignore_eos=True, **fields)

    async def drop_at_once(self) -> None:
        _, writer = await self._open(b"")
        writer.close()

    async def leave_while_it_works(self) -> None:
        _, writer = await self._open(self._endless(stream=self.random.random() < 0.5, n=self.random.choice([1, 2, 8])))
        await asyncio.sleep(self.random.random() * 0.3)
        writer.transport.abort() if self.random.random() < 0.5 else writer.close()

    async def read_a_little_and_leave(self) -> None:
        reader, writer = await self._open(self._endless(stream=True))
        await reader.read(self.random.randrange(1, 2000))
        writer.close()

    async def send_half_a_body(self) -> None:
        data = self._endless()
        _, writer = await self._open(data[: self.random.randrange(1, len(data))])
        await asyncio.sleep(self.random.random() * 0.1)
        writer.close()

    async def send_noise(self) -> None:
        reader, writer = await self._open(self.random.randbytes(self.random.randrange(1, 300)) + b"\r\n\r\n")
        writer.write_eof()
        await reader.read()
        writer.close()

    async def ask_nonsense(self) -> None:
        bodies: list[Any] = [
            b"{", b"[]", {"messages": []}, {"messages": [{"role": "user", "content": "x"}], "n": 10**9},
        ]  # fmt: skip
        status, _ = await self._ask(request_bytes("/v1/chat/completions", self.random.choice(bodies)))
        assert status == 400

    async def ask_too_much(self) -> None:
        status, _ = await self._ask(request_bytes("/v1/completions", {"prompt": [5] * 5000}))
        assert status == 400

    async def read_slowly(self) -> None:
        reader, writer = await self._open(self._endless(stream=True, max_tokens=200))
        for _ in range(20):
            if not await reader.read(64):
                break
            await asyncio.sleep(0.02)
        writer.close()

    async def fail_in_a_draw(self) -> None:
        token_ids = {"allowed_token_ids": [5], "bad_words": [], "logit_bias": {"5": -100}, "max_tokens": 3}
        status, _ = await self._ask(self._endless(**token_ids))
        assert status in (400, 429)


FAULTS = (
    Soak.drop_at_once, Soak.leave_while_it_works, Soak.leave_while_it_works, Soak.read_a_little_and_leave,
    Soak.send_half_a_body, Soak.send_noise, Soak.ask_nonsense, Soak.ask_too_much, Soak.read_slowly,
    Soak.fail_in_a_draw,
)  # fmt: skip


@contextmanager
def logged_errors() -> Iterator[list[logging.LogRecord]]:
    """Collects what the server logs as its own errors."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = found.append
    loggers = [logging.getLogger(name) for name in ("pace", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield found
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def held_bytes() -> int:
    """Resident bytes of this process, without garbage and without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def soak(
    seconds: float,
    num_honest: int,
    num_faulty: int,
    seed: int,
    kind: type[Soak] = Soak,
    make: Callable[[], Generator] = lambda: make_generator(kv_cache_bytes="48MiB"),
    least: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Runs the soak until all faults have occurred and the counts are at `least`. Returns the counts.

    `make` makes the engine, and `kind` has the clients. Raises AssertionError for a wrong text, a logged error, a leak,
    too small counts, or a server that fails a plain request afterwards."""
    generator = make()
    with logged_errors() as errors, Serving(generator) as serving:
        play = kind(serving, seed)
        asyncio.run(play.learn())
        warm_up = min(seconds / 4, 60.0)  # allocations that happen once are done in it
        asyncio.run(play.run(warm_up, num_honest, num_faulty))
        play.check_idle()
        before = held_bytes()
        least = Counter({"honest": 1, **{fault.__name__: 1 for fault in play.faults}, **least})
        asyncio.run(play.run(seconds, num_honest, num_faulty, lambda: play.counts >= least))
        play.check_idle()
        grown = held_bytes() - before
        asyncio.run(play.learn())
        play.check_idle()
    generator.driver.close()
    assert not play.wrong, play.wrong[:3]
    assert not errors, [error.getMessage() for error in errors[:3]]
    assert play.counts >= least, play.counts
    memory = [size >> 20 for size in play.memory]
    assert grown < 64 << 20, f"{grown >> 20} MiB more than before; while it ran, the process had {memory} MiB"
    return {"seconds": seconds, "grown_bytes": grown, "memory_mib": memory, "wrong": len(play.wrong), **play.counts}


def main(run: Callable[..., dict[str, Any]] = soak) -> None:
    parser = argparse.ArgumentParser(
        description=sys.modules[run.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--honest", type=int, default=64)
    parser.add_argument("--faulty", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.seconds, arguments.honest, arguments.faulty, arguments.seed)))


if __name__ == "__main__":
    main()
