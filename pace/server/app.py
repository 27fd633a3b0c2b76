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
from pace.server.endpoints import ENDPOINTS, as_api_error
from pace.server.errors import ApiError
from pace.server.metrics import CONTENT_TYPE
from pace.server.network import http
from pace.server.network.starting import ALIVE
from pace.server.page import page
from pace.server.prefixes.names import check_name
from pace.server.prefixes.store import OFF
from pace.server.schemas import description
from pace.server.service import Service
from pace.server.wire import tokens
from pace.server.wire.form import dumps
from pace.server.wire.props import properties


def make_app(service: Service) -> Starlette:
    """Returns the ASGI application of a service."""
    document = description.document(
        [(one.paths[0], one.schema, one.body_type, one.content_types, one.is_anthropic) for one in ENDPOINTS],
        {path: function.__name__ for path, function in INFORMATION.items() if path not in UNDOCUMENTED},
    )

    async def openapi(request: Request) -> Response:
        return _json(document)

    async def unknown(request: Request, error: HTTPException) -> Response:
        service.metrics.answered("other", error.status_code)
        message = f"there is no {request.url.path[:200]} here"
        if error.status_code == 405:
            message = f"{request.url.path[:200]} does not support {request.method}"
        return _json_error(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    routes = [Route(path, endpoint, methods=["POST"]) for endpoint in ENDPOINTS for path in endpoint.paths]
    routes += [Route(path, Information(path, function), methods=["GET"]) for path, function in INFORMATION.items()]
    routes += [Route(path, Information(path, delete_prefix), methods=["DELETE"]) for path in PREFIX_PATHS]
    routes += [Route(path, Information(path, unload_adapter), methods=["DELETE"]) for path in ADAPTER_PATHS]
    routes += [Route("/openapi.json", openapi)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: unknown})
    app.router.redirect_slashes = False
    app.state.service = service
    return app


# -- information -------------------------------------------------------------------------------------------------------


Look = Callable[[Service, Request], Awaitable[Any]]
"""Function that returns a response, or a value to send as JSON."""


@dataclass(frozen=True)
class Information:
    """ASGI application for one path with information about the server, which needs no work of the engine."""

    path: str
    function: Look

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        service: Service = scope["app"].state.service
        try:
            value = await self.function(service, Request(scope))
            response = value if isinstance(value, Response) else _json(value)
        except Exception as error:
            response = _json_error(as_api_error(scope, error))
        service.metrics.answered(self.path, response.status_code)
        await response(scope, receive, send)


async def chat_page(service: Service, request: Request) -> Any:
    found = page()
    if found.is_known(request.headers.get("if-none-match")):
        return Response(status_code=304, headers=found.headers)
    return Response(found.body, headers=found.headers)


async def live(service: Service, request: Request) -> Any:
    return ALIVE


async def health(service: Service, request: Request) -> Any:
    service.check_well()
    return {"status": "ok"}


async def ready(service: Service, request: Request) -> Any:
    service.check_ready()
    return {"status": "ready"}


async def models(service: Service, request: Request) -> Any:
    names = (*service.options.model_names, *service.adapters.names)
    return {"object": "list", "data": [_model(service, name) for name in names]}


async def model(service: Service, request: Request) -> Any:
    return _model(service, service.check_model(request.path_params["name"]))


async def tokenizer_info(service: Service, request: Request) -> Any:
    service.check_ready()
    return await service.work(tokens.tokenizer_info, service.reader)


async def props(service: Service, request: Request) -> Any:
    return await service.work(
        properties, service.loaded, service.options.model_names[0], service.reader, service.limits
    )


async def limits(service: Service, request: Request) -> Any:
    return service.limits.shown()


async def metrics(service: Service, request: Request) -> Any:
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def version(service: Service, request: Request) -> Any:
    return {"version": __version__}


async def prefixes(service: Service, request: Request) -> Any:
    kept = service.prefixes
    return {"object": "list", "data": [] if kept is None else await service.work(kept.listed, _salt(request))}


async def delete_prefix(service: Service, request: Request) -> Any:
    name = request.path_params["name"]
    if service.prefixes is None:
        raise ApiError(400, OFF, code="prefixes_not_kept")
    check_name(name)
    await service.prefixes.delete(name, _salt(request))
    return {"object": "prefix", "name": name, "deleted": True}


async def adapters(service: Service, request: Request) -> Any:
    return service.adapters.listed()


async def unload_adapter(service: Service, request: Request) -> Any:
    name = request.path_params["name"]
    service.adapters.unload(name)
    return {"object": "adapter", "name": name, "deleted": True}


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


def _model(service: Service, name: str) -> dict[str, Any]:
    described = {"id": name, "object": "model", "created": service.started, "owned_by": "pace", "root": name}
    if name in service.adapters.names:
        described["parent"] = service.options.model_names[0]
    if service.max_length is not None:
        described["max_model_len"] = service.max_length
    return described


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


def _json_error(error: ApiError) -> Response:
    return Response(dumps(error.openai()), error.status, error.headers, "application/json")
