"""An HTTP server with scripted answers: bytes, and a delay before each piece."""

from __future__ import annotations

import asyncio
import json
import selectors
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest import mock

Script = Iterable[tuple[float, bytes]]
"""Seconds to wait, and the bytes to send afterwards; b"" sends nothing."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": None}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def whole(status: int, value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def stream(num_tokens: int, first: float, gap: float, prompt: int = 7) -> Iterator[tuple[float, bytes]]:
    """One piece of text per token: the first after `first` seconds, each other piece after `gap` seconds."""
    yield first, HEAD + chunk(text("a"))
    for _ in range(num_tokens - 1):
        yield gap, chunk(text("b"))
    yield 0, chunk(usage(prompt, num_tokens)) + chunk(b"data: [DONE]\n\n") + END


class ScriptedServer:
    """Answers the n-th request (from 0) with `answer(n, body)`."""

    def __init__(self, answer: Callable[[int, dict], Script]) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[dict] = []
        self.num_connections = 0
        self.url = ""
        self._open: list[asyncio.StreamWriter] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._open.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.heads.append(head)
                self.bodies.append(body)
                for delay, data in self.answer(len(self.heads) - 1, body):
                    await asyncio.sleep(delay)
                    if data is CLOSE:
                        return
                    writer.write(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


CLOSE = b"close"
"""Closes the connection at this place in a script."""


@asynccontextmanager
async def serving(answer: Callable[[int, dict], Script]):
    """Runs a ScriptedServer; its address is `url`."""
    server = ScriptedServer(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = "http://127.0.0.1:%d" % listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for writer in server._open:
            writer.close()


class JumpingClock(selectors.DefaultSelector):
    """Time that passes only while an event loop has nothing else to do: it jumps to the loop's next timer. So times are
    exact on any machine, and delays cost nothing."""

    SETTLE_SECONDS = 0.005
    """Real time for bytes on their way through the system."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list:
        found = super().select(timeout and min(timeout, self.SETTLE_SECONDS))
        if timeout and not found:
            self.now += timeout
        return found

    def run(self, coroutine):
        """Like `asyncio.run`, with this clock for the loop and for the load test."""
        loop = asyncio.SelectorEventLoop(self)
        loop.time = lambda: self.now
        clock = SimpleNamespace(perf_counter=loop.time, process_time=time.process_time)
        with (
            mock.patch("pace.bench.serving.run.time", clock),
            mock.patch("pace.bench.serving.record.time", clock),
            asyncio.Runner(loop_factory=lambda: loop) as runner,
        ):
            return runner.run(coroutine)
