"""The few things that routes need of HTTP, on bare ASGI: a body with a bound, answers as bytes, streams of events, and
the news that a client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from pace.server.errors import ApiError
from pace.server.wire.form import dumps

logger = logging.getLogger("pace")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

KEEP_ALIVE = b": still here\n\n"
"""A comment of server-sent events: clients pass over it."""
KEEP_ALIVE_SECONDS = 15.0


class ClientGone(Exception):
    """The connection has closed: nobody is there to be answered."""


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name; "" where there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 for more than `most_bytes`, 415 for what is not sent as JSON, and
    ClientGone."""
    too_large = ApiError(413, f"the body may have {most_bytes} bytes", headers={"connection": "close"})
    length = header(scope, b"content-length")
    if length.isdigit() and int(length) > most_bytes:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise too_large
        if not message.get("more_body"):
            break
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json":  # read first: a connection that closes on unread bytes takes the answer with it
        raise ApiError(415, f"send the body as content-type: application/json; got {kind[:60] or 'none'!r}")
    return bytes(body)


@asynccontextmanager
async def cancelled_when_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block once the client's connection has closed, and raises ClientGone then. The body must have been
    read."""
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
    """Sends server-sent events as they come. What is b"" is not sent: an empty body would end the stream. HTTP/1.0 has
    no chunks: there they come all at the end."""
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
