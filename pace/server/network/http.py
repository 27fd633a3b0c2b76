"""HTTP helpers for routes, on plain ASGI: bodies with a limit, answers as bytes, event streams, and detection of
clients that have gone."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from pace.server.errors import ApiError
from pace.server.wire.form import dumps

logger = logging.getLogger("pace")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

KEEP_ALIVE = b": still here\n\n"
"""Comment in server-sent events, which clients ignore."""
KEEP_ALIVE_SECONDS = 15.0
MAX_MEMBERS = 16
"""Maximum number of members of a gzip body; clients write one. The rest after each member is copied, which takes
quadratic time for many members."""


class ClientGone(Exception):
    """The connection has closed: there is no client to answer."""


def header(scope: Scope, name: bytes) -> str:
    """Returns the first header with this name; "" if there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


class LargeBodies:
    """Bytes of all large bodies of requests in progress, and their maximum. Used on the event loop only."""

    def __init__(self, free_bytes: int, max_bytes: int, rejected: Callable[[str], object]) -> None:
        """Bodies of at most `free_bytes` do not count. `rejected` is called with "memory" for each refused body."""
        self._rejected = rejected
        self._free_bytes = free_bytes
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that takes the size of a body so far. It raises ApiError 429 if that is too much. The body
        counts until the block ends."""
        counted = 0

        def check(num_bytes: int) -> None:
            nonlocal counted
            if num_bytes <= max(counted, self._free_bytes):
                return
            if self.num_bytes + num_bytes - counted > self._max_bytes:
                self._rejected("memory")
                headers = {"retry-after": "5", "connection": "close"}
                raise ApiError(429, "large requests are in progress; try again in 5 s", headers=headers)
            self.num_bytes += num_bytes - counted
            counted = num_bytes

        try:
            yield check
        finally:
            self.num_bytes -= counted


async def read_body(
    scope: Scope,
    receive: Receive,
    max_bytes: int,
    check: Callable[[int], None] = lambda num_bytes: None,
    content_type: str = "application/json",
) -> bytes:
    """Returns the whole body, decompressed, and changes the scope's headers accordingly. Raises ApiError 413 for more
    than `max_bytes`, compressed or not, and what `check` raises for the size so far. Raises 415 if the body is not sent
    as `content_type`, or has a coding other than gzip. Raises 400 for invalid gzip, and ClientGone."""
    too_large = ApiError(413, f"the body may have at most {max_bytes} bytes", headers={"connection": "close"})
    length = header(scope, b"content-length")
    if length.isdigit():
        if int(length) > max_bytes:
            raise too_large
        check(int(length))
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        check(len(body))
        if not message.get("more_body"):
            break
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != content_type:  # checked after reading: closing a connection with unread bytes loses the answer
        raise ApiError(415, f"send the body as content-type: {content_type}; got {kind[:60] or 'none'!r}")
    if (coding := _coding(scope)) == "":
        return bytes(body)
    if coding != "gzip":
        what = f"unsupported content-encoding {coding[:60]!r}; send the body uncompressed or as gzip"
        raise ApiError(415, what, headers={"accept-encoding": "gzip"})
    plain = await asyncio.to_thread(gunzip, bytes(body), max_bytes)
    check(len(body) + len(plain))
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")]
    return plain


def _coding(scope: Scope) -> str:
    """Returns the body's content coding: "gzip", another word, or "" if there is none."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"]
    codings = [coding.strip().lower() for coding in ",".join(values).split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    return "gzip" if codings in (["gzip"], ["x-gzip"]) else ", ".join(codings)


def gunzip(data: bytes, max_bytes: int) -> bytes:
    """Decompresses gzip data, one member after the other. Never decompresses more than `max_bytes` and one byte.
    Raises ApiError."""
    plain, left, num_members = bytearray(), data, 0
    while left or not num_members:
        if (num_members := num_members + 1) > MAX_MEMBERS:
            raise ApiError(400, f"the gzip body has more than {MAX_MEMBERS} members")
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            plain += member.decompress(left, max_bytes - len(plain) + 1)
        except zlib.error:
            raise ApiError(400, "the body is not gzip, although its content-encoding is") from None
        if len(plain) > max_bytes:
            raise ApiError(413, f"the body may have at most {max_bytes} bytes when decompressed")
        if not member.eof:
            raise ApiError(400, "the gzip body is incomplete")
        left = member.unused_data
    return bytes(plain)


@asynccontextmanager
async def cancelled_when_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block once the client's connection has closed, and then raises ClientGone. The body must have been
    read before."""
    task, gone = asyncio.current_task(), False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def send_json(send: Send, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
    await send_bytes(send, dumps(value), status, {"content-type": "application/json", **(headers or {})})


async def send_bytes(send: Send, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
    await send(_start(status, {"content-length": str(len(body)), **(headers or {})}))
    await send({"type": "http.response.body", "body": body})


async def send_events(
    scope: Scope, send: Send, events: AsyncIterator[bytes], headers: dict[str, str] | None = None
) -> None:
    """Sends server-sent events as they come. Skips b"", since an empty body would end the stream. HTTP/1.0 has no
    chunks: there all events are sent at the end."""
    fixed = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    if scope["http_version"] == "1.0":
        body = b"".join([event async for event in events])
        return await send_bytes(send, body, headers={**fixed, **(headers or {})})
    await send(_start(200, {**fixed, **(headers or {})}))
    async for event in events:
        if event:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def send_error(send: Send, error: ApiError, is_anthropic: bool = False) -> None:
    body = error.anthropic() if is_anthropic else error.openai()
    await send_json(send, body, error.status, error.headers)


def _start(status: int, headers: dict[str, str]) -> dict[str, Any]:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
