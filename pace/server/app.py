"""The routes. Each kind of request is a `Kind`: a schema, what it refuses, and the form of its answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pace import __version__
from pace.server import http
from pace.server.answers import Answer
from pace.server.body import read_json
from pace.server.errors import ApiError
from pace.server.metrics import CONTENT_TYPE
from pace.server.schemas import chat, completions
from pace.server.schemas.fields import Request as Schema
from pace.server.schemas.fields import parse
from pace.server.service import Service
from pace.server.wire.chat import ChatForm
from pace.server.wire.completions import CompletionsForm
from pace.server.wire.form import WireForm
from pace.server.wire.openai import Envelope

logger = logging.getLogger("pace")

LOOK = ["GET", "HEAD"]


@dataclass(frozen=True)
class Kind:
    """One kind of request that generates."""

    paths: tuple[str, ...]
    schema: type[Schema]
    refused: dict[str, str]
    inert: frozenset[str]
    form: Callable[[Any, Envelope, Any], WireForm]
    id_prefix: str
    is_anthropic: bool = False


KINDS = (
    Kind(
        ("/v1/chat/completions", "/chat/completions"),
        chat.ChatRequest,
        chat.CHAT_REFUSED,
        chat.CHAT_INERT,
        ChatForm,
        "chatcmpl-",
    ),
    Kind(
        ("/v1/completions", "/completions"),
        completions.CompletionsRequest,
        completions.COMPLETIONS_REFUSED,
        completions.COMPLETIONS_INERT,
        CompletionsForm,
        "cmpl-",
    ),
)


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a service: routes, and errors in the form that clients read."""
    app = FastAPI(title="pace", version=__version__, docs_url=None, redoc_url=None)
    for kind in KINDS:
        _add_kind(app, service, kind)
    _add_information(app, service)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not for this path"}
        headers = dict(error.headers or {})
        return Reply(ApiError(error.status_code, what.get(error.status_code, str(error.detail)), headers=headers))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return Reply(_internal(request.scope, error))

    return app


class Reply(Response):
    """An answer in JSON, or an error."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.background = None

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        if isinstance(self._value, ApiError):
            await http.send_error(send, self._value)
        else:
            await http.send_json(send, self._value)


class Generation(Response):
    """The answer of a request that generates. Reads the body itself, so that nothing of it is held twice."""

    def __init__(self, service: Service, kind: Kind) -> None:
        self._service = service
        self._kind = kind
        self.background = None

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        client = scope.get("pace") or {}
        has_begun = False

        async def tracked(message: dict[str, Any]) -> None:
            nonlocal has_begun
            if not has_begun:
                self._service.metrics.answered(self._kind.paths[0], message["status"])
            has_begun = True
            await send(message)

        try:
            await self._answer(scope, receive, tracked, client)
        except http.ClientGone:
            self._service.metrics.client_gone()
        except Exception as error:
            known = error if isinstance(error, ApiError) else _internal(scope, error)
            if has_begun:  # the status line is out: only the end of the connection can tell
                raise
            await http.send_error(tracked, known, self._kind.is_anthropic)

    async def _answer(self, scope: http.Scope, receive: http.Receive, send: http.Send, client: dict[str, Any]) -> None:
        service, kind = self._service, self._kind
        body = await http.read_body(scope, receive, service.limits.body_bytes)
        async with http.cancelled_when_gone(receive):
            request, ignored = parse(kind.schema, read_json(body, service.limits.json_depth), kind.refused, kind.inert)
            if ignored and service.options.strict:
                raise ApiError(400, f"{ignored[0][:60]}: no field of this name is known", param=ignored[0][:60])
            headers = {"x-pace-ignored": ", ".join(map(_printable, ignored[:20]))} if ignored else {}
            model = service.check_model(request.model)
            job = request.to_job(service.limits, service.defaults)
            job.priority = _priority(job.priority, service.options.allow_priority)
            async with service.answer(job, client.get("salt"), client.get("key")) as answer:
                envelope = Envelope.new(kind.id_prefix, model, service.fingerprint)
                form = kind.form(request, envelope, service.tokenizer)
                if job.stream:
                    first = await _first(answer)
                    await http.send_events(send, _events(form, answer, first, scope), headers)
                else:
                    choices = await answer.whole()
                    await http.send_json(send, form.whole(choices, answer.usage), headers=headers)


async def _events(
    form: WireForm, answer: Answer, pieces: AsyncIterator[list[Any]], scope: http.Scope
) -> AsyncIterator[bytes]:
    """The events of a stream. What goes wrong is one of them."""
    yield form.begin(answer.usage)
    try:
        async for news in pieces:
            usage = answer.usage
            yield b"".join(form.piece(piece, usage) for piece in news) or http.KEEP_ALIVE
    except Exception as error:
        yield form.error(error if isinstance(error, ApiError) else _internal(scope, error))
        return
    yield form.end(answer.usage)


async def _first(answer: Answer) -> AsyncIterator[list[Any]]:
    """The pieces of an answer, once the first are there or a while has passed: what fails at once is a plain error."""
    pieces = answer.pieces(http.KEEP_ALIVE_SECONDS)
    try:
        first = await anext(pieces)
    except StopAsyncIteration:
        first = []

    async def all_of_them() -> AsyncIterator[list[Any]]:
        yield first
        async for more in pieces:
            yield more

    return all_of_them()


def _add_kind(app: FastAPI, service: Service, kind: Kind) -> None:
    schema = kind.schema.model_json_schema()
    described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    async def generate(request: Request) -> Response:
        return Generation(service, kind)

    for path in kind.paths:
        app.add_api_route(
            path, generate, methods=["POST"], openapi_extra=described, include_in_schema=path == kind.paths[0]
        )


def _add_information(app: FastAPI, service: Service) -> None:
    """What there is to know of the server, without any work of the engine's."""

    @app.api_route("/health", methods=LOOK)
    async def health() -> Response:
        if (why := service.why_unwell) is not None:
            return Reply(ApiError(503, why))
        return Reply({"status": "ok"})

    @app.api_route("/ready", methods=LOOK)
    async def ready() -> Response:
        service.check_ready()
        return Reply({"status": "ready"})

    @app.api_route("/v1/models", methods=LOOK)
    @app.api_route("/models", methods=LOOK, include_in_schema=False)
    async def models() -> Response:
        return Reply({"object": "list", "data": [_model(service, name) for name in service.options.model_names]})

    @app.api_route("/v1/models/{name:path}", methods=LOOK)
    async def model(name: str) -> Response:
        return Reply(_model(service, service.check_model(name)))

    @app.api_route("/limits", methods=LOOK)
    async def limits() -> Response:
        return Reply(service.limits.shown())

    @app.api_route("/metrics", methods=LOOK)
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.api_route("/version", methods=LOOK)
    async def version() -> Response:
        return Reply({"version": __version__})

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return Reply(error)


def _model(service: Service, name: str) -> dict[str, Any]:
    described = {"id": name, "object": "model", "created": service.started, "owned_by": "pace", "root": name}
    if service.status == "ready":
        described["max_model_len"] = service.max_length
    return described


def _priority(wanted: int, is_allowed: bool) -> int:
    """The engine's: higher is earlier there, lower on the wire. Without leave all are alike."""
    return max(-100, min(100, -wanted)) if is_allowed else 0


def _printable(name: str) -> str:
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name[:60])


def _internal(scope: http.Scope, error: Exception) -> ApiError:
    """What a client hears of a fault of ours; the log has the rest."""
    request_id = (scope.get("pace") or {}).get("request_id", "")
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return ApiError(500, "the server failed at this request", headers={"x-should-retry": "false"})
