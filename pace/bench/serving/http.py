"""A small HTTP/1.1 client that passes received bytes on in the same callback.

A task only wakes once its answer is complete: many streams cost little compared with the server under load.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
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
        self.headers: dict[str, str] = {}
        """Names are in lower case; a repeated header keeps its last value."""
        self.has_begun = False
        self.is_done = False
        self._buffer = bytearray()
        self._remaining = 0
        self._read = self._read_head

    @property
    def keeps_connection(self) -> bool:
        """True if the connection can be used for another request."""
        ends_by_closing = self._read == self._read_until_close
        return self.is_done and not self._buffer and not ends_by_closing and self._connection != "close"

    def feed(self, data: bytes | memoryview) -> bytes:
        """Returns the bytes of the body in `data`. Raises BadResponse."""
        self.has_begun = True
        self._buffer += data
        body: list[bytes] = []
        while not self.is_done and self._read(body):
            pass
        return b"".join(body)

    def close(self) -> None:
        """Handles the end of the connection. Raises ConnectionError if the answer is incomplete."""
        if self._read == self._read_until_close:
            self.is_done = True
        if not self.is_done:
            raise ConnectionResetError("the connection was closed in the middle of an answer")

    @property
    def _connection(self) -> str:
        return self.headers.get("connection", "").lower()

    # Each of these reads one part of an answer. It returns False if more bytes are needed.

    def _read_head(self, body: list[bytes]) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES:
                raise BadResponse(f"the head of the answer is longer than {HEAD_BYTES >> 10} KiB")
            return False
        first, *lines = self._take(end + 4)[:-4].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise BadResponse(f"not an answer in HTTP/1.1: {first[:80]!r}")
        self.status = int(rest[:3])
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        if version == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        if self.status >= 200:  # informational answers come before the final one
            self._read_body_by(self.headers)
        return True

    def _read_body_by(self, headers: dict[str, str]) -> None:
        if self.status in (204, 304):
            self.is_done = True
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._read = self._read_chunk_size
        elif "content-length" in headers:
            self._remaining = _number(headers["content-length"], 10)
            self._read, self.is_done = self._read_counted, self._remaining == 0
        else:
            self._read = self._read_until_close

    def _read_counted(self, body: list[bytes]) -> bool:
        has_more = self._take_remaining(body)
        self.is_done = self._remaining == 0
        return has_more

    def _read_until_close(self, body: list[bytes]) -> bool:
        body.append(self._take(len(self._buffer)))
        return False

    def _read_chunk_size(self, body: list[bytes]) -> bool:
        line_end = self._find_line_end()
        if line_end < 0:
            return False
        size = _number(self._buffer[:line_end].partition(b";")[0], 16)
        start, end = line_end + 2, line_end + 2 + size
        if size and self._buffer[end : end + 2] == b"\r\n":  # the usual case: the whole chunk has arrived
            body.append(self._take(end + 2)[start:end])
            return True
        self._take(start)
        self._remaining = size
        self._read = self._read_chunk if size else self._read_trailer
        return True

    def _read_chunk(self, body: list[bytes]) -> bool:
        if self._remaining:
            return self._take_remaining(body)
        if len(self._buffer) < 2:
            return False
        if self._take(2) != b"\r\n":
            raise BadResponse("a chunk of the answer is longer than it says")
        self._read = self._read_chunk_size
        return True

    def _read_trailer(self, body: list[bytes]) -> bool:
        line_end = self._find_line_end()
        if line_end < 0:
            return False
        self._take(line_end + 2)
        self.is_done = line_end == 0
        return True

    def _take_remaining(self, body: list[bytes]) -> bool:
        part = self._take(min(self._remaining, len(self._buffer)))
        self._remaining -= len(part)
        body.append(part)
        return bool(part)

    def _find_line_end(self) -> int:
        """Index of the end of the line; -1 if it has not arrived."""
        end = self._buffer.find(b"\r\n")
        if end < 0 and len(self._buffer) > HEAD_BYTES:
            raise BadResponse("a line of the answer does not end")
        return end

    def _take(self, count: int) -> bytes:
        part = bytes(self._buffer[:count])
        del self._buffer[:count]
        return part


def _number(text: str | bytearray, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise BadResponse(f"not a length: {str(text[:40])}")
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
            raise ValueError(f"{url!r} is no URL of a server; give one such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ValueError("a URL with a password in it is not used; set OPENAI_API_KEY")
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
                raise ValueError("OPENAI_API_KEY holds characters that a header cannot")
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
