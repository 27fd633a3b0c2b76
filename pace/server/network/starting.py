"""What the port answers before there is a service, which takes seconds to import: `/health` alone."""

from __future__ import annotations

from pace.server.errors import ApiError
from pace.server.network.security import Application, Receive, Scope, Send

HEALTHY = b'{"status":"ok"}'


class Starting:
    """ASGI application that passes everything on to `app`, once that is set. Until then raises ApiError 503 for all but
    `/health`."""

    def __init__(self) -> None:
        self.app: Application | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            return await self.app(scope, receive, send)
        if scope["path"] != "/health" or scope["method"] not in ("GET", "HEAD"):
            raise ApiError(503, "the model is loading", headers={"retry-after": "5"})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(HEALTHY))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": HEALTHY})
