"""What the port answers before there is a service, which takes seconds to import."""

from __future__ import annotations

from pace.server.errors import LOADING, ApiError, NotWell
from pace.server.network.http import send_json
from pace.server.network.security import Application, Receive, Scope, Send

ALIVE = {"status": "alive"}
"""What `/live` answers as long as there is a process."""


class Starting:
    """ASGI application that passes everything on to `app`, once that is set. Until then raises ApiError 503 for all but
    `/live`."""

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
