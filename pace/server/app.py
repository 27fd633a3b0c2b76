"""The application: routes to the endpoints, and to information about the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pace import __version__
from pace.server.embeddings.endpoints import ENCODING_ENDPOINTS
from pace.server.endpoints import ENDPOINTS, as_api_error
from pace.server.errors import ApiError
from pace.server.metrics import CONTENT_TYPE
from pace.server.models.pool import ModelPool
from pace.server.network import http
from pace.server.network.starting import ALIVE
from pace.server.page import page
from pace.server.prefixes.names import check_name
from pace.server.prefixes.store import OFF
from pace.server.schemas import description
from pace.server.service import Service
from pace.server.wire import tokens
from pace.server.wire.form import dumps


def make_app(pool: ModelPool) -> Starlette:
    """Returns the ASGI application of a server's models."""
    posts = (*ENDPOINTS, *ENCODING_ENDPOINTS)
    document = description.document(
        [(one.paths[0], one.schema, one.body_type, one.content_types, one.is_anthropic) for one in posts],
        {path: function.__name__ for path, function in INFORMATION.items() if path not in UNDOCUMENTED},
    )

    async def openapi(request: Request) -> Response:
        return _json(document)

    async def unknown(request: Request, error: HTTPException) -> Response:
        pool.metrics.answered("other", error.status_code)
        message = f"there is no {request.url.path[:200]} here"
        if error.status_code == 405:
            message = f"{request.url.path[:200]} does not support {request.method}"
        return _json_error(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    routes = [Route(path, endpoint, methods=["POST"]) for endpoint in posts for path in endpoint.paths]
    routes += [Route(path, Information(path, function), methods=["GET"]) for path, function in INFORMATION.items()]
    routes += [Route(path, Information(path, delete_prefix), methods=["DELETE"]) for path in PREFIX_PATHS]
    routes += [Route(path, Information(path, unload_adapter), methods=["DELETE"]) for path in ADAPTER_PATHS]
    routes += [Route("/openapi.json", openapi)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: unknown})
    app.router.redirect_slashes = False
    app.state.pool = pool
    return app


# -- information -------------------------------------------------------------------------------------------------------


Look = Callable[[ModelPool, Request], Awaitable[Any]]
"""Function that returns a response, or a value to send as JSON."""


@dataclass(frozen=True)
class Information:
    """ASGI application for one path with information about the server, which needs no work of the engine."""

    path: str
    function: Look

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        pool: ModelPool = scope["app"].state.pool
        try:
            value = await self.function(pool, Request(scope))
            response = value if isinstance(value, Response) else _json(value)
        except Exception as error:
            response = _json_error(as_api_error(scope, error))
        pool.metrics.answered(self.path, response.status_code)
        await response(scope, receive, send)


async def chat_page(pool: ModelPool, request: Request) -> Any:
    found = page()
    if found.is_known(request.headers.get("if-none-match")):
        return Response(status_code=304, headers=found.headers)
    return Response(found.body, headers=found.headers)


async def live(pool: ModelPool, request: Request) -> Any:
    return ALIVE


async def health(pool: ModelPool, request: Request) -> Any:
    pool.check_well()
    return {"status": "ok"}


async def ready(pool: ModelPool, request: Request) -> Any:
    pool.check_ready()
    return {"status": "ready"}


async def models(pool: ModelPool, request: Request) -> Any:
    return {"object": "list", "data": [pool.described(name, model) for model in pool.models for name in model.names]}


async def model(pool: ModelPool, request: Request) -> Any:
    name = request.path_params["name"]
    return pool.described(name, pool.find(name))


async def tokenizer_info(pool: ModelPool, request: Request) -> Any:
    service = _service(pool, request)
    service.check_ready()
    return await service.work(tokens.tokenizer_info, service.reader)


async def props(pool: ModelPool, request: Request) -> Any:
    return await pool.properties(request.query_params.get("model"))


async def limits(pool: ModelPool, request: Request) -> Any:
    return pool.limits.shown()


async def metrics(pool: ModelPool, request: Request) -> Any:
    return Response(pool.render_metrics(), headers={"content-type": CONTENT_TYPE})


async def version(pool: ModelPool, request: Request) -> Any:
    return {"version": __version__}


async def prefixes(pool: ModelPool, request: Request) -> Any:
    kept = _service(pool, request).prefixes
    return {"object": "list", "data": [] if kept is None else await pool.shared.work(kept.listed, _salt(request))}


async def delete_prefix(pool: ModelPool, request: Request) -> Any:
    name = request.path_params["name"]
    kept = _service(pool, request).prefixes
    if kept is None:
        raise ApiError(400, OFF, code="prefixes_not_kept")
    check_name(name)
    await kept.delete(name, _salt(request))
    return {"object": "prefix", "name": name, "deleted": True}


async def adapters(pool: ModelPool, request: Request) -> Any:
    return _service(pool, request).adapters.listed()


async def unload_adapter(pool: ModelPool, request: Request) -> Any:
    name = request.path_params["name"]
    owner = name if name in pool.names else None
    pool.find(request.query_params.get("model", owner)).adapters.unload(name)
    return {"object": "adapter", "name": name, "deleted": True}


def _service(pool: ModelPool, request: Request) -> Service:
    """Returns the model that `?model=` names, or the first. Raises ApiError 404."""
    return pool.find(request.query_params.get("model"))


def _salt(request: Request) -> str | None:
    return (request.scope.get("pace") or {}).get("salt")


ADAPTER_PATHS = ("/lora-adapters/{name:path}", "/v1/lora-adapters/{name:path}")
PREFIX_PATHS = ("/prefixes/{name}", "/v1/prefixes/{name}")
INFORMATION: dict[str, Look] = {
    "/": chat_page,
    "/live": live,
    "/health": health,
    "/ready": ready,
    "/v1/models": models,
    "/models": models,
    "/v1/models/{name:path}": model,
    "/lora-adapters": adapters,
    "/v1/lora-adapters": adapters,
    "/prefixes": prefixes,
    "/v1/prefixes": prefixes,
    "/tokenizer_info": tokenizer_info,
    "/props": props,
    "/limits": limits,
    "/metrics": metrics,
    "/version": version,
}
UNDOCUMENTED = ("/", "/models", "/v1/lora-adapters", "/v1/prefixes")


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


def _json_error(error: ApiError) -> Response:
    return Response(dumps(error.openai()), error.status, error.headers, "application/json")
