"""A small HTTP/1.1 client that passes received bytes on in the same callback.

A task only wakes once its answer is complete: many streams cost little compared with the server under load.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

HEAD_BYTES = 64 << 10
"""Maximum size of the head of an answer."""

RECEIVED_BYTES = 16 << 10
"""Size of a connection's receive buffer. By default asyncio makes one of 256 KiB for each."""

OnBody = Callable[[int, bytes], None]
"""Called with the status of an answer and a part of its body."""


class BadResponse(Exception):
    """Raised if an answer is not valid HTTP/1.1."""


class ResponseParser:
    """Parses one answer from chunks of any size."""

    def __init__(self) -> None:
        self.status = 0
        self.has_begun = False
        self.is_done = False
        self.keeps_connection = False
        """True if the connection can be used for another request."""
        self._ends_by_closing = False
        self._buffer = bytearray()
        self._body: list[bytes] = []
        self._steps = self._parse()
        next(self._steps)

    def feed(self, data: bytes | memoryview) -> bytes:
        """Returns the bytes of the body in `data`. Raises BadResponse."""
        self.has_begun = True
        self._buffer += data
        if not self.is_done and next(self._steps, self) is self:
            self.is_done = True
        self.keeps_connection = self.keeps_connection and not (self.is_done and self._buffer)
        body, self._body = b"".join(self._body), []
        return body

    def close(self) -> None:
        """Handles the end of the connection. Raises ConnectionError if the answer is incomplete."""
        self.is_done = self.is_done or self._ends_by_closing
        if not self.is_done:
            raise ConnectionResetError("the connection was closed in the middle of an answer")

    # The parts of an answer. Each of these generators yields when more bytes are needed.

    def _parse(self) -> Iterator[None]:
        headers = {}
        while self.status < 200:  # informational answers come before the final one
            head = yield from self._up_to(b"\r\n\r\n", "the head of the answer")
            first, *lines = head.decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
                raise BadResponse(f"not an answer in HTTP/1.1: {first[:80]!r}")
            self.status = int(rest[:3])
            pairs = (line.partition(":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        connection = headers.get("connection", "close" if version == "HTTP/1.0" else "").lower()
        if self.status in (204, 304):
            pass
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            yield from self._chunks()
        elif "content-length" in headers:
            yield from self._pass_on(_number(headers["content-length"], 10))
        else:
            self._ends_by_closing = True
            while True:
                self._body.append(self._take(len(self._buffer)))
                yield
        self.keeps_connection = connection != "close"

    def _chunks(self) -> Iterator[None]:
        while size := _number((yield from self._up_to(b"\r\n", "a line of the answer")).partition(b";")[0], 16):
            yield from self._pass_on(size)
            while len(self._buffer) < 2:
                yield
            if self._take(2) != b"\r\n":
                raise BadResponse("a chunk of the answer is longer than its declared size")
        while (yield from self._up_to(b"\r\n", "a line of the answer")):
            pass  # the trailer, which ends with an empty line

    def _pass_on(self, size: int) -> Iterator[None]:
        """Moves `size` bytes to the body, as they arrive."""
        while size:
            part = self._take(min(size, len(self._buffer)))
            self._body.append(part)
            size -= len(part)
            if size:
                yield

    def _up_to(self, mark: bytes, what: str) -> Generator[None, None, bytes]:
        """Returns the bytes before `mark`."""
        while (end := self._buffer.find(mark)) < 0:
            if len(self._buffer) > HEAD_BYTES:
                raise BadResponse(f"{what} is longer than {HEAD_BYTES >> 10} KiB")
            yield
        return self._take(end + len(mark))[:end]

    def _take(self, count: int) -> bytes:
        part = bytes(self._buffer[:count])
        del self._buffer[:count]
        return part


def _number(text: str | bytes, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise BadResponse(f"not a length: {text[:40]!r}")
    return number


@dataclass(frozen=True)
class Address:
    """Address of a server."""

    scheme: str
    host: str
    port: int
    base: str
    """Prefix of every path, such as "/models/a"; usually ""."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parses a URL such as `http://127.0.0.1:8000`, with or without a path. A trailing `/v1` belongs to the API and
        is removed. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the URL of a server; give one such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ValueError("a URL must not contain a password; set OPENAI_API_KEY instead")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.scheme == "https" else 80) else f"{name}:{self.port}"


class Client:
    """Sends requests to one server, and reuses connections that the server keeps open."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        self._idle: list[_Connection] = []
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None
        lines = [f"Host: {address.host_header}", "User-Agent: pace-bench", "Accept: */*"]
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ValueError("OPENAI_API_KEY contains characters that a header cannot contain")
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "".join(line + "\r\n" for line in lines)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Returns status and body."""
        body: list[bytes] = []
        status = await self._request(self._message("GET", path, b""), lambda status, data: body.append(data))
        return status, b"".join(body)

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Sends JSON and returns the status once the whole answer has gone to `on_body`. Exceptions of `on_body`
        propagate.

        Raises: OSError if the connection fails (ConnectionError if it ends early); BadResponse."""
        return await self._request(self._message("POST", path, body), on_body)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self.address.base}{path} HTTP/1.1\r\n{self._headers}{content}\r\n".encode("ascii") + body

    async def _request(self, message: bytes, on_body: OnBody) -> int:
        while True:
            connection, is_used = await self._connection()
            try:
                return await connection.exchange(message, on_body)
            except ConnectionError:
                if not is_used or connection.has_answered:
                    raise
                # The server had closed the idle connection, so it has not read the request.
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.abort()

    async def _connection(self) -> tuple[_Connection, bool]:
        """Returns a connection, and True if it was used before."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, True
        address = self.address
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, address.host, address.port, ssl=self._ssl)
        return connection, False


class _Connection(asyncio.BufferedProtocol):
    """A connection with one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._on_body: OnBody = lambda status, data: None
        self._done: asyncio.Future[int] | None = None
        self._received = memoryview(bytearray(RECEIVED_BYTES))

    @property
    def has_answered(self) -> bool:
        """True if any byte of an answer to the last request has arrived."""
        return self._parser.has_begun

    @property
    def is_reusable(self) -> bool:
        return not self._transport.is_closing() and self._parser.keeps_connection

    async def exchange(self, message: bytes, on_body: OnBody) -> int:
        self._parser, self._on_body = ResponseParser(), on_body
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            return await self._done
        finally:
            self._done, self._on_body = None, lambda status, data: None

    def abort(self) -> None:
        self._transport.abort()

    # -- callbacks of asyncio --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, num_bytes: int) -> None:
        if self._done is None or self._done.done():
            self._transport.abort()  # data without a request
            return
        try:
            body = self._parser.feed(self._received[:num_bytes])
            if body:
                self._on_body(self._parser.status, body)
        except Exception as error:
            self._done.set_exception(error)
            return
        if self._parser.is_done:
            self._done.set_result(self._parser.status)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        try:
            if error is not None:
                raise error
            self._parser.close()
        except Exception as why:
            self._done.set_exception(why)
        else:
            self._done.set_result(self._parser.status)
