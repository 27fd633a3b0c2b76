"""Routes of the server and their endpoints."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pace import __version__
from pace.server.answers import Answer
from pace.server.body import LARGE, read_json
from pace.server.errors import ApiError
from pace.server.kinds import ASKING, GENERATING, Asking, Generating, Kind
from pace.server.metrics import CONTENT_TYPE
from pace.server.network import http
from pace.server.network.access_log import Access
from pace.server.network.starting import ALIVE
from pace.server.page import page
from pace.server.schemas import description
from pace.server.schemas.fields import parse
from pace.server.service import Service
from pace.server.wire import tokens
from pace.server.wire.form import WireForm
from pace.server.wire.props import properties

logger = logging.getLogger("pace")


def make_app(service: Service) -> FastAPI:
    """Returns the ASGI application of a service."""
    app = FastAPI(title="pace", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    components: dict[str, Any] = {}
    for kind in GENERATING:
        _add_kind(app, kind, Generation(service, kind), components)
    for kind in ASKING:
        _add_kind(app, kind, Question(service, kind), components)
    _add_information(app, service)
    describe = app.openapi
    app.openapi = lambda: description.complete(describe(), components)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not for this path"}
        headers = dict(error.headers or {})
        service.metrics.answered("other", error.status_code)
        return Reply(ApiError(error.status_code, what.get(error.status_code, str(error.detail)), headers=headers))

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return Reply(error)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return Reply(_internal(request.scope, error))

    return app


# -- requests with a body ----------------------------------------------------------------------------------------------


class Posted(Response):
    """ASGI endpoint for one kind of POST request. Reads the body itself to avoid a second copy. Subclasses define
    `answer`."""

    def __init__(self, service: Service, kind: Kind) -> None:
        self.service = service
        self.kind = kind
        self.background = None

    def check(self) -> None:
        """Raises ApiError if no request can be answered now, before any work is done for it."""

    async def answer(self, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send) -> None:
        """Answers a parsed request, with `headers`. Raises ApiError."""
        raise NotImplementedError

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        has_begun = False

        async def tracked(message: dict[str, Any]) -> None:
            nonlocal has_begun
            if not has_begun:
                self.service.metrics.answered(self.kind.name, message["status"])
            has_begun = True
            await send(message)

        try:
            body = await http.read_body(scope, receive, self.service.limits.body_bytes)
            async with http.cancelled_when_gone(receive):
                self.check()
                is_large = len(body) > LARGE
                read = self._read, body, Access.of(scope)
                request, headers = await self.service.work(*read) if is_large else self._read(*read[1:])
                await self.answer(request, headers, scope, tracked)
        except http.ClientGone:
            self.service.metrics.client_gone()
        except Exception as error:
            known = error if isinstance(error, ApiError) else _internal(scope, error)
            if has_begun:  # the status line is sent: only closing the connection can report it
                raise
            await http.send_error(tracked, known, self.kind.is_anthropic)

    def _read(self, body: bytes, access: Access) -> tuple[Any, dict[str, str]]:
        """Returns the request, and headers that name its unknown fields."""
        kind, options = self.kind, self.service.options
        value = read_json(body, self.service.limits.json_depth)
        access.model = _model_of(value, options.model_names[0])
        request, ignored = parse(kind.schema, value, kind.refused, kind.inert)
        if ignored and options.strict:
            raise ApiError(400, f"{ignored[0][:60]}: no field of this name is known", param=ignored[0][:60])
        return request, {"x-pace-ignored": ", ".join(map(_printable, ignored[:20]))} if ignored else {}


class Question(Posted):
    """Endpoint answered by the tokenizer."""

    kind: Asking

    async def answer(self, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send) -> None:
        service = self.service
        service.check_model(request.model)
        service.check_ready()
        value = await service.work(self.kind.answer, request, service.reader, service.limits)
        await http.send_json(send, value, headers=headers)


class Generation(Posted):
    """Endpoint answered by the engine."""

    kind: Generating

    def check(self) -> None:
        self.service.check_room()

    async def answer(self, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send) -> None:
        client = scope.get("pace") or {}
        answered = self.service.answer_request(self.kind, request, client.get("salt"), client.get("key"))
        async with answered as (job, form, answer):
            Access.of(scope).answer = answer
            if job.warnings:
                headers["x-pace-warnings"] = "; ".join(_printable(warning) for warning in job.warnings[:10])
            if job.stream:
                pieces = await _begun(answer)
                await http.send_events(scope, send, _events(form, answer, pieces, scope), headers)
            else:
                choices = await answer.whole()
                await http.send_json(send, form.whole(choices, answer.usage), headers=headers)


async def _begun(answer: Answer) -> AsyncIterator[list[Any]]:
    """Returns the pieces of an answer, once the first are there or a while has passed: an immediate failure is a plain
    error."""
    pieces = answer.pieces(http.KEEP_ALIVE_SECONDS)
    first = await anext(pieces)

    async def all_of_them() -> AsyncIterator[list[Any]]:
        yield first
        async for more in pieces:
            yield more

    return all_of_them()


async def _events(
    form: WireForm, answer: Answer, pieces: AsyncIterator[list[Any]], scope: http.Scope
) -> AsyncIterator[bytes]:
    """Yields the events of a stream. An error is one of them."""
    yield form.begin(answer.usage)
    try:
        async for news in pieces:
            usage = answer.usage
            yield b"".join(form.piece(piece, usage) for piece in news) or http.KEEP_ALIVE
    except Exception as error:
        yield form.error(error if isinstance(error, ApiError) else _internal(scope, error))
        return
    yield form.end(answer.usage)


def _add_kind(app: FastAPI, kind: Kind, answer: Posted, components: dict[str, Any]) -> None:
    described = {"requestBody": description.body(kind.schema, components)}
    types = ("application/json", "text/event-stream") if kind in GENERATING else ("application/json",)
    answers = description.operation(types, kind.is_anthropic)

    async def give() -> Response:
        return answer

    for path in kind.paths:
        app.add_api_route(
            path, give, methods=["POST"], openapi_extra=described, responses=answers, response_class=Response,
            include_in_schema=path == kind.paths[0],
        )  # fmt: skip


def _model_of(value: Any, default: str) -> str | None:
    """Returns the model that a body names; `default` if it names none."""
    model = value.get("model", default) if isinstance(value, dict) else None
    return model if isinstance(model, str) else None


def _printable(name: str) -> str:
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name[:60])


# -- information -------------------------------------------------------------------------------------------------------


class Reply(Response):
    """Response with JSON, or with an error."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.status_code = value.status if isinstance(value, ApiError) else 200
        self.background = None

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        if isinstance(self._value, ApiError):
            await http.send_error(send, self._value)
        else:
            await http.send_json(send, self._value)


def _add_information(app: FastAPI, service: Service) -> None:
    """Adds the routes with information about the server, which need no work of the engine."""

    def look(path: str, is_documented: bool = True, content_type: str = "application/json") -> Callable[[Any], Any]:
        """Adds routes for GET and HEAD."""

        def add(function: Any) -> Any:
            @functools.wraps(function)
            async def counted(**arguments: Any) -> Response:
                try:
                    answer = await function(**arguments)
                except ApiError as error:
                    answer = Reply(error)
                service.metrics.answered(path, answer.status_code)
                return answer

            app.add_api_route(
                path, counted, methods=["GET"], responses=description.operation((content_type,)),
                response_class=Response, include_in_schema=is_documented,
            )  # fmt: skip
            app.add_api_route(path, counted, methods=["HEAD"], include_in_schema=False)
            return function

        return add

    @look("/", False)
    async def chat_page(request: Request) -> Response:
        found = page()
        if found.is_known(request.headers.get("if-none-match")):
            return Response(status_code=304, headers=found.headers)
        return Response(found.body, headers=found.headers)

    @look("/live")
    async def live() -> Response:
        return Reply(ALIVE)

    @look("/health")
    async def health() -> Response:
        service.check_well()
        return Reply({"status": "ok"})

    @look("/ready")
    async def ready() -> Response:
        service.check_ready()
        return Reply({"status": "ready"})

    @look("/v1/models")
    @look("/models", False)
    async def models() -> Response:
        return Reply({"object": "list", "data": [_model(service, name) for name in service.options.model_names]})

    @look("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return Reply(_model(service, service.check_model(name)))

    @look("/tokenizer_info")
    async def tokenizer_info() -> Response:
        service.check_ready()
        return Reply(await service.work(tokens.tokenizer_info, service.reader))

    @look("/props")
    async def props() -> Response:
        given = service.model_name, service.reader, service.defaults, service.limits, service.num_slots
        return Reply(await service.work(properties, *given))

    @look("/limits")
    async def limits() -> Response:
        return Reply(service.limits.shown())

    @look("/metrics", content_type="text/plain")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @look("/version")
    async def version() -> Response:
        return Reply({"version": __version__})


def _model(service: Service, name: str) -> dict[str, Any]:
    described = {"id": name, "object": "model", "created": service.started, "owned_by": "pace", "root": name}
    if service.max_length is not None:
        described["max_model_len"] = service.max_length
    return described


def _internal(scope: http.Scope, error: Exception) -> ApiError:
    """Returns the error that a client gets for an internal failure; the log has the details."""
    request_id = (scope.get("pace") or {}).get("request_id", "")
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return ApiError(500, "the server failed at this request", headers={"x-should-retry": "false"})
