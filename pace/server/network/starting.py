"""Answers of the port before the service exists, which takes seconds to import."""

from __future__ import annotations

from pace.server.errors import LOADING, ApiError, NotWell
from pace.server.network.http import send_json
from pace.server.network.security import Application, Receive, Scope, Send

ALIVE = {"status": "alive"}
"""Answer of `/live` while the process runs."""


class Starting:
    """ASGI application that forwards everything to `app`, once that is set. Until then raises ApiError 503 for all
    paths but `/live`."""

    def __init__(self) -> None:
        self.app: Application | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            return await self.app(scope, receive, send)
        if scope["path"] == "/live" and scope["method"] in ("GET", "HEAD"):
            return await send_json(send, ALIVE)
        if scope["path"] == "/health":
            raise NotWell("loading", LOADING)
        raise ApiError(503, LOADING, headers={"retry-after": "5"})
