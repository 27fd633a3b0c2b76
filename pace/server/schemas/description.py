"""The OpenAPI document of `/openapi.json`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from pace import __version__
from pace.server.schemas.media import AUDIO_FORMATS, DETAILS, IMAGE_TYPES, TEXTS


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_STRING = {"type": "string"}
_NULLABLE = {"type": ["string", "null"]}
_DATA = {"type": "string", "contentEncoding": "base64"}
_URL = _STRING | {"pattern": f"^data:({'|'.join(IMAGE_TYPES)});base64,"}
_DETAIL = {"enum": [*DETAILS]}
_SOURCE = _object(
    ["type", "media_type", "data"], type={"const": "base64"}, media_type={"enum": [*IMAGE_TYPES]}, data=_DATA
)
_PARTS = [
    _object(["type", "text"], type={"enum": [*TEXTS]}, text=_STRING),
    _object(
        ["type", "image_url"],
        type={"enum": ["image_url", "input_image"]},
        image_url={"anyOf": [_URL, _object(["url"], url=_URL, detail=_DETAIL)]},
        detail=_DETAIL,
    ),
    _object(["type", "source"], type={"const": "image"}, source=_SOURCE),
    _object(
        ["type", "input_audio"],
        type={"const": "input_audio"},
        input_audio=_object(["data", "format"], data=_DATA, format={"enum": [*AUDIO_FORMATS]}),
    ),
]
CONTENT = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": _PARTS}}]}
"""Content of a message: a text, or parts with text, images and sound."""
_OPENAI_ERROR = _object(
    ["error"],
    error=_object(["message", "type", "param", "code"], message=_STRING, type=_STRING, param=_NULLABLE, code=_NULLABLE),
)
_ANTHROPIC_ERROR = _object(
    ["type", "error"], type={"const": "error"}, error=_object(["type", "message"], type=_STRING, message=_STRING)
)


def document(
    posts: Iterable[tuple[str, type[BaseModel], str, tuple[str, ...], bool]], gets: dict[str, str]
) -> dict[str, Any]:
    """Returns the OpenAPI document. For each endpoint, `posts` has a path, a schema, types of the body and of answers,
    and `is_anthropic`. `gets` has the name of each path of information."""
    components: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, schema, body_type, content_types, is_anthropic in posts:
        members = {
            "requestBody": _body(schema, body_type, components),
            "responses": responses(content_types, is_anthropic),
        }
        paths[path] = {"post": _named("give", path, "post") | members}
    for path, name in gets.items():
        path = path.replace(":path}", "}")
        parameters = [
            {"name": part, "in": "path", "required": True, "schema": {"type": "string", "title": part.title()}}
            for part in re.findall(r"{(\w+)}", path)
        ]
        content_type = "text/plain" if name == "metrics" else "application/json"
        members = {**({"parameters": parameters} if parameters else {}), "responses": responses((content_type,))}
        paths.setdefault(path, {})["get"] = _named(name, path, "get") | members
    info = {"title": "pace", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def responses(content_types: tuple[str, ...] = ("application/json",), is_anthropic: bool = False) -> dict[str, Any]:
    """Returns the answers of an operation: that of status 200, and the form of every error."""
    answers = {kind: {"schema": {"type": "object"} if kind.endswith("json") else {}} for kind in content_types}
    error = _ANTHROPIC_ERROR if is_anthropic else _OPENAI_ERROR
    return {
        "200": {"description": "The answer", "content": answers},
        "default": {"description": "An error", "content": {"application/json": {"schema": error}}},
    }


def _named(name: str, path: str, method: str) -> dict[str, str]:
    """Returns the names of an operation. Generated clients have functions of these names, so they must not change."""
    return {
        "summary": name.replace("_", " ").title(),
        "operationId": re.sub(r"\W", "_", f"{name}{path}") + f"_{method}",
    }


def _body(schema: type[BaseModel], body_type: str, components: dict[str, Any]) -> dict[str, Any]:
    """Returns the description of a request's body. Adds the schemas that it refers to to `components`, under unique
    names."""
    described = schema.model_json_schema(ref_template=f"#/components/schemas/{schema.__name__}.{{model}}")
    for name, part in described.pop("$defs", {}).items():
        components[f"{schema.__name__}.{name}"] = part
    return {"content": {body_type: {"schema": described}}, "required": True}
