"""Access control: keys, the `Host` of unkeyed requests, and the origins of web pages. It is in front of the
application, and every request passes it."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from pace.server.errors import ApiError
from pace.server.network.access_log import Access
from pace.server.network.http import send_error
from pace.server.network.refusals import Headers, id_headers, is_anthropic, request_id
from pace.server.options import ServeOptions

logger = logging.getLogger("pace")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC = dict.fromkeys(("/", "/live", "/health", "/ready"), ("GET", "HEAD"))
"""Paths that need no key: the chat page, which asks for one, and the probes."""
SHOWN_HEADERS = b"retry-after, retry-after-ms, x-pace-ignored, x-request-id"
"""Response headers that a page of another origin may read, in addition to the usual ones."""
PREFLIGHT_SECONDS = 600


@dataclass(frozen=True)
class Client:
    """Data of a key, which does not reveal the key."""

    digest: bytes
    """Digest to compare with that of a request's key."""
    name: str
    """Name in logs and counters."""
    salt: str
    """Salt of the prefix cache, so that no client learns from timing what another has asked."""

    @classmethod
    def of(cls, key: str) -> Client:
        def derived(purpose: bytes) -> str:
            return hmac.new(key.encode(), purpose, hashlib.sha256).hexdigest()

        return cls(_digest(key.encode()), derived(b"name")[:8], derived(b"prefix cache"))


class Gate:
    """ASGI middleware. Forwards authorised requests, with `scope["pace"]`:

    request_id   the client's own `x-request-id`, or a new one. Every answer has it.
    key          the name of its key. None if no key is needed.
    salt         of the prefix cache. None if no key is needed.
    access       the entry of the access log, to be filled in.
    """

    def __init__(self, app: Application, options: ServeOptions) -> None:
        self.app = app
        self.clients = [Client.of(key) for key in options.keys]
        self.hosts = options.hosts
        self.logs_access = options.access_log
        self.origins = frozenset(origin.encode() for origin in options.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not supported")

        headers = scope["headers"]
        own_id = scope.get("pace_request_id") or request_id(headers)
        access = Access(own_id, scope["method"], scope["path"])
        scope["pace"] = {"request_id": own_id, "key": None, "salt": None, "access": access}
        more = [*id_headers(own_id, scope["path"]), *self._cors_headers(headers)]
        started = False

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                access.status = message["status"]
                message = {**message, "headers": _joined(message.get("headers", ()), more)}
            await send(message)

        try:
            self._check_host(headers)
            if _is_preflight(scope):
                return await self._answer_preflight(scope, send_with_headers)
            self._check_origin(headers)
            self._check_key(scope)
            _check_path(scope["path"])
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            if started:
                raise
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", own_id)
                error = ApiError(500, f"the server failed to answer this request; its log has details under {own_id}")
                error.headers["x-should-retry"] = "false"
            await send_error(send_with_headers, error, is_anthropic(scope["path"]))
        finally:
            if self.logs_access:
                access.status = access.status or scope.get("pace_refused")
                access.write()

    # -- checks, which raise ApiError ----------------------------------------------------------------------------------

    def _check_host(self, headers: Headers) -> None:
        if self.hosts is None:
            return
        named = _values(headers, b"host")
        if len(named) != 1 or _without_port(named[0]) not in self.hosts:
            raise ApiError(
                403,
                "the name in the Host header is not allowed; the server's owner may add it to the allowed hosts",
                code="unknown_host",
            )

    def _check_key(self, scope: Scope) -> None:
        if not self.clients or scope["method"] in PUBLIC.get(scope["path"], ()):
            return
        given = _keys(scope["headers"])
        client = self._find(given)
        if client is None:
            raise ApiError(
                401,
                "the API key is not valid for this server"
                if given
                else "an API key is required: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        scope["pace"].update(key=client.name, salt=client.salt)
        scope["pace"]["access"].key = client.name

    def _check_origin(self, headers: Headers) -> None:
        """Refuses forms of web pages of other origins. For all other types of bodies, browsers send a preflight."""
        kinds, origins = _values(headers, b"content-type"), _values(headers, b"origin")
        if not origins or not any(kind.strip().lower().startswith(b"multipart/") for kind in kinds):
            return
        own = [origin.partition(b"://")[2] for origin in origins] == _values(headers, b"host")
        if not own and not any(name == b"access-control-allow-origin" for name, _ in self._cors_headers(headers)):
            raise ApiError(403, "web pages of this origin may not call this server", code="unknown_origin")

    def _find(self, given: list[bytes]) -> Client | None:
        """Compares with every key, even after a match, so that the time reveals nothing."""
        found = None
        for digest in map(_digest, given):
            for client in self.clients:
                if hmac.compare_digest(digest, client.digest):
                    found = client
        return found

    # -- pages of other origins ----------------------------------------------------------------------------------------

    def _cors_headers(self, headers: Headers) -> Headers:
        """Returns the CORS headers. Never allows credentials: a key is sent in a header that the page itself sets."""
        origins = _values(headers, b"origin")
        if not self.origins or len(origins) != 1:
            return []
        if b"*" in self.origins:
            allowed = b"*"
        elif origins[0] in self.origins:
            allowed = origins[0]
        else:
            return [(b"vary", b"Origin")]
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", SHOWN_HEADERS),
            (b"vary", b"Origin"),
        ]

    async def _answer_preflight(self, scope: Scope, send: Send) -> None:
        """Answers a browser's preflight request, which has no key."""
        headers = scope["headers"]
        if not any(name == b"access-control-allow-origin" for name, _ in self._cors_headers(headers)):
            raise ApiError(403, "web pages of this origin may not call this server", code="unknown_origin")
        wanted = b", ".join(_values(headers, b"access-control-request-headers"))
        allowed = [(b"access-control-allow-methods", b"GET, POST, DELETE"), (b"content-length", b"0")]
        allowed.append((b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS))
        if re.fullmatch(rb"[A-Za-z0-9, -]{1,2000}", wanted):
            allowed.append((b"access-control-allow-headers", wanted))
        await send({"type": "http.response.start", "status": 200, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})


def _is_preflight(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def _check_path(path: str) -> None:
    """Refuses paths that a proxy in front or a file system could resolve to another path."""
    parts = path.split("/")
    if "" in parts[1:-1] or "." in parts or ".." in parts or "\\" in path or not path.isprintable():
        raise ApiError(404, "there is no such path", code="unknown_path")


def _keys(headers: Headers) -> list[bytes]:
    """Returns every key of a request: `Authorization: Bearer KEY`, with the scheme in any case, and `X-Api-Key:
    KEY`."""
    keys = [value.strip() for value in _values(headers, b"x-api-key")]
    for value in _values(headers, b"authorization"):
        scheme, _, key = value.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            keys.append(key.strip())
    return [key for key in keys if key]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _without_port(host: bytes) -> str:
    """Returns `localhost` for `LocalHost:8000`, and `::1` for `[::1]:8000`."""
    match = re.fullmatch(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?", host.decode("latin-1").strip().lower())
    return (match[1] or match[2] or "").removesuffix(".") if match else ""


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for other, value in headers if other == name]


def _joined(headers: Any, more: Headers) -> Headers:
    """Joins the application's headers and ours. Ours replace headers with the same name, except `vary`."""
    ours = {name for name, _ in more if name != b"vary"}
    return [(name, value) for name, value in headers if name.lower() not in ours] + more
