"""A server on a thread of the test process, and clients that control every byte they send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import uvicorn.server

from pace.server.limits import Limits
from pace.server.network.run import _Server, listening, uvicorn_config
from pace.server.options import ServeOptions
from tests.waiting import PATIENCE, wait_until

GET = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n"


def serve_options(**more) -> ServeOptions:
    return ServeOptions(**{"model": "tiny", "port": 0, **more})


class ExampleApp:
    """Paths that echo, wait, flood or break. `calls` has the requested paths, `gone` those of disconnected clients."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gone: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        path = scope["path"]
        self.calls.append(path)
        if path == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.append(path)
            return
        if path == "/flood":
            await self._flood(receive, send)
            self.gone.append(path)
            return
        body, more = b"", True
        while more and path != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.append(path)
                return
            body, more = body + message["body"], message["more_body"]
        size = 60_000 if path == "/large" else 0
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        answer = json.dumps({"path": path, "body": body.decode("latin-1"), "headers": headers, "pad": "x" * size})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.encode()})

    async def _flood(self, receive, send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        watcher = asyncio.create_task(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not watcher.done():
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            await asyncio.sleep(0)


class EndsSoon(_Server):
    """Checks 100 times a second, not 10 times, whether it should end, and then whether its connections are closed."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        with mock.patch.object(uvicorn.server, "asyncio", _ShortSleeps()):
            await super().shutdown(sockets)


class _ShortSleeps:
    """`asyncio` whose sleeps are a tenth as long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


class Running:
    """A running server: its address, and its record of requests."""

    def __init__(self, options: ServeOptions, app) -> None:
        self.options, self.app = options, app
        self.server: _Server | None = None
        self.address: tuple | str = ""
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def connections(self) -> set:
        return self.server.server_state.connections

    def pass_time(self, seconds: float) -> None:
        pass_time(self.loop, seconds)

    def pass_time_until(self, condition: Callable[[], Any], seconds: float) -> None:
        """Lets `seconds` pass, as often as needed."""
        wait_until(lambda: self.pass_time(seconds) or condition())

    def connect(self, timeout: float = PATIENCE, receive_buffer: int | None = None) -> socket.socket:
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        client = socket.socket(family, socket.SOCK_STREAM)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(timeout)
        client.connect(self.address)
        return client

    def say(self, *pieces: bytes) -> bytes:
        """Sends the pieces, and returns all bytes received until the server closes the connection."""
        with self.connect() as client:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for piece in pieces:
                    client.sendall(piece)
            return read_all(client)


@contextlib.contextmanager
def serving(app=None, send_buffer: int | None = None, **more):
    """A `Running` server of `app`, with the given limits or fields of ServeOptions."""
    names = Limits.names()
    limits = Limits(**{name: value for name, value in more.items() if name in names})
    options = serve_options(limits=limits, **{name: value for name, value in more.items() if name not in names})
    running = Running(options, app or ExampleApp())
    started = threading.Event()

    async def run(listener: socket.socket) -> None:
        running.loop = asyncio.get_running_loop()
        running.server = EndsSoon(uvicorn_config(options, running.app))
        serve = asyncio.create_task(running.server.serve(sockets=[listener]))
        await running.server.is_listening.wait()
        started.set()
        await serve

    with listening(options) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        running.address = listener.getsockname()
        thread = threading.Thread(target=lambda: asyncio.run(run(listener)))
        thread.start()
        try:
            assert started.wait(PATIENCE)
            yield running
        finally:
            running.server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def pass_time(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Sets the clock of a server's loop forward, once it has read what was sent. Returns when the timers that are due
    have run."""

    async def jump() -> None:
        await asyncio.sleep(0.01)
        time_before = loop.time
        loop.time = lambda: time_before() + seconds
        await asyncio.sleep(0.001)

    asyncio.run_coroutine_threadsafe(jump(), loop).result(PATIENCE)


def read_all(client: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            received += piece
    return received


def read_answer(client: socket.socket) -> bytes:
    """Reads one answer with a Content-Length from a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        body += client.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def parts(answer: bytes) -> tuple[int, dict[str, str], dict]:
    """Status, headers and JSON of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), json.loads(body)
