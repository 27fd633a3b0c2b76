"""The HTTP ingress: checks a request, chooses a replica, and reports an error to the client if that replica dies.

It has no model, and needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from pace.integrations.ray.metrics import joined
from pace.integrations.ray.routing import prefix_key
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.network import http
from pace.server.network.refusals import is_anthropic
from pace.server.network.security import Gate
from pace.server.options import ServeOptions
from pace.server.wire.form import data_event, named_event

TAKE_SECONDS, LOOK_SECONDS = 60.0, 10.0
"""Time limits for a replica to accept a POST request, and any other request. All replicas may be starting."""
PASSED_ON = ("type", "http_version", "method", "path", "query_string", "headers", "scheme", "pace")
"""Keys of an ASGI scope that replicas need."""
EVENTS = "text/event-stream"


class Ingress:
    """The deployment that Ray's proxy sends requests to."""

    def __init__(self, replicas: DeploymentHandle, options: ServeOptions) -> None:
        self._app = Gate(Forward(replicas, options.limits), options)

    async def __call__(self, request: Request) -> Response:
        return _Answer(self._app)


class _Answer(Response):
    """The response of an ASGI application. Its paths do not include `route_prefix`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.background = None

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
        await self._app({**scope, "path": path, "root_path": ""}, receive, send)


class Forward:
    """ASGI application that forwards requests to a replica. It runs behind `Gate`, which turns its exceptions into
    responses."""

    def __init__(self, replicas: DeploymentHandle, limits: Limits) -> None:
        self._replicas = replicas
        self._limits = limits

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        if scope["method"] in ("GET", "HEAD") and scope["path"] == "/metrics":
            return await self._send_metrics(send)
        body, key, seconds = b"", "", LOOK_SECONDS
        try:
            if scope["method"] == "POST":
                body = await http.read_body(scope, receive, self._limits.body_bytes)
                key, seconds = prefix_key(body, scope["pace"]["salt"]), TAKE_SECONDS
            async with http.cancelled_when_gone(receive):
                await self._pass_on(scope, body, key, seconds, send)
        except http.ClientGone:
            pass  # the replica counts it

    async def _pass_on(self, scope: http.Scope, body: bytes, key: str, seconds: float, send: http.Send) -> None:
        """Raises ApiError if no replica accepts the request within `seconds`, or if one dies before it answers."""
        passed = {name: scope[name] for name in PASSED_ON if name in scope}
        answer = self._replicas.options(stream=True, session_id=key).answer.remote(passed, body)
        begun = is_stream = False
        try:
            await _taken(answer, seconds)
            async for message in answer:
                if not begun:
                    is_stream = http.header(message, b"content-type").startswith(EVENTS)
                    begun = True
                await send(message)
        except (RayActorError, DeploymentUnavailableError) as error:
            lost = ApiError(503, "the replica that answered is gone: try again", headers={"retry-after": "1"})
            if not begun:
                raise lost from error
            if not is_stream:
                raise  # the answer is shorter than its content-length, so the client notices
            await send({"type": "http.response.body", "body": _error_event(lost, scope["path"])})
        except BaseException:
            answer.cancel()
            raise

    async def _send_metrics(self, send: http.Send) -> None:
        """Sends the metrics of all replicas that answer."""
        try:
            pages = await self._replicas.broadcast("metrics").results_async(
                timeout_s=LOOK_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            pages = []
        page = joined(dict(page for page in pages if not isinstance(page, BaseException)))
        await http.send_bytes(send, page, headers={"content-type": CONTENT_TYPE_LATEST})


async def _taken(answer: AsyncIterator[Any], seconds: float) -> None:
    try:
        await asyncio.wait_for(anext(answer), seconds)
    except TimeoutError:
        raise ApiError(
            503, f"no replica took the request within {seconds:g} s: try again", headers={"retry-after": "5"}
        ) from None


def _error_event(error: ApiError, path: str) -> bytes:
    """Returns the last event of a stream that ends too early. The usual end marker does not follow it."""
    if is_anthropic(path):
        return named_event("error", error.anthropic())
    if path.endswith("/responses"):
        return named_event("error", {"type": "error", **error.openai()})
    return data_event(error.openai())
