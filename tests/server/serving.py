"""A server of the bundled model in this process, on a real socket, and simple clients that send any bytes."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import threading
import time
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from pace.assets import TINY
from pace.llm.generator import Generator
from pace.llm.loading import load
from pace.llm.loading.options import LoadOptions
from pace.server.app import make_app
from pace.server.limits import Limits
from pace.server.models.pool import ModelPool
from pace.server.network.run import uvicorn_config
from pace.server.network.security import Gate
from pace.server.options import ServeOptions
from pace.server.service import Service
from tests.server.network.connections import EndsSoon, pass_time
from tests.waiting import PATIENCE, wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
LONG = [{"role": "user", "content": "Tell me a story about a fox."}]


def make_generator(**options: Any) -> Generator:
    """An engine of the bundled model."""
    loaded = load.open_model(LoadOptions(str(TINY), progress=False, **options))
    return Generator(loaded.engine, loaded.tokenizer, loaded.defaults, checkpoint=loaded.checkpoint)


@functools.cache
def shared_generator() -> Generator:
    """One generator for all tests that leave it unchanged."""
    return make_generator(kv_cache_bytes="64MiB")


class Serving:
    """A running server, for a `with` block. The end of the block checks that nothing in the engine is in use."""

    pool: ModelPool | None = None

    def __init__(self, generator: Generator | None = None, **options: Any) -> None:
        """`options` are fields of `ServeOptions`, or names of limits. A grammar may take long on a busy machine."""
        names = Limits.names()
        chosen = {name: options.pop(name) for name in list(options) if name in names}
        limits = Limits(**{"grammar_seconds": PATIENCE, **chosen})
        load = LoadOptions(str(TINY), progress=False)
        self.options = ServeOptions(str(TINY), served_model_names=("tiny", "alias"), limits=limits, **options)
        self.generator = generator or shared_generator()
        self.service = Service(self.options, load)
        self.service.use(self.generator)

    def __enter__(self) -> Serving:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.pool = self.pool or ModelPool.of(self.service)
        app = Gate(make_app(self.pool), self.options)
        self._server = EndsSoon(uvicorn_config(self.options, app, lambda: self.pool.max_body_bytes))
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def _run(self, listener: socket.socket) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[listener])

        asyncio.run(serve())

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if exception[0] is None:
            self.check_idle()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pass_time(self, seconds: float) -> None:
        pass_time(self.loop, seconds)

    def check_idle(self) -> None:
        """Waits until no request is running, and checks that no block, body or decoded medium is leaked.

        A request whose client has disconnected may still arrive while this waits: then the wait begins again.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                assert self.service.admission.num_requests == 0 and self.service.admission.num_waiting == 0
                shared = self.service.shared
                assert shared.large_bodies.num_bytes == 0 and shared.media_workers._num_tokens == 0
                return self.generator.driver.call(lambda engine: engine.check_idle()).result(PATIENCE)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.005)

    # -- clients ---------------------------------------------------------------------------------------------------

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
        """Sends one request on a new connection. `body` is encoded as JSON; bytes are sent unchanged."""
        connection = self.connect()
        with connection:
            connection.sendall(request_bytes(path, body, method, **headers))
            return read_reply(connection)

    def chat(self, messages: list[dict[str, Any]] = QUESTION, **fields: Any) -> Reply:
        return self.ask("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})

    def complete(self, prompt: Any, **fields: Any) -> Reply:
        return self.ask("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def check_well(self) -> None:
        """Checks that a plain request gives its exact text."""
        reply = self.chat(max_tokens=30)
        assert reply.status == 200, reply.body
        assert reply.json["choices"][0]["message"]["content"] == ANSWER


class Reply:
    """Answer of the server."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Data of the server-sent events, in order; the last one, [DONE], as a string."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def request_bytes(path: str, body: Any = None, method: str | None = None, **headers: str) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "127.0.0.1", "Connection": "close"}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def read_reply(connection: socket.socket) -> Reply:
    """Reads a whole answer, until the connection is closed."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return Reply(int(status.split()[1]), headers, body)


def _joined(body: bytes) -> bytes:
    """Joins the chunks of a chunked body."""
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        whole, body = whole + body[:length], body[length + 2 :]
    return whole


def text_of(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a chat or completions stream."""
    text = ""
    for event in events:
        for choice in [] if event == "[DONE]" else event.get("choices", ()):
            if choice["index"] == index:
                text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)
