"""Descriptions of requests and answers in `/openapi.json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
"""Content of a message: a text, or parts of type text."""
_NULLABLE = {"type": ["string", "null"]}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"}, "param": _NULLABLE, "code": _NULLABLE,
            },
        }
    },
}  # fmt: skip
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def operation(content_types: tuple[str, ...] = ("application/json",), is_anthropic: bool = False) -> dict[str, Any]:
    """Returns the answers of an operation: that of status 200, and the form of every error."""
    answers = {kind: {"schema": {"type": "object"} if kind.endswith("json") else {}} for kind in content_types}
    error = _ANTHROPIC_ERROR if is_anthropic else _OPENAI_ERROR
    return {
        200: {"description": "The answer", "content": answers},
        "default": {"description": "An error", "content": {"application/json": {"schema": error}}},
    }


def body(schema: type[BaseModel], components: dict[str, Any]) -> dict[str, Any]:
    """Returns the description of a request's body. Adds the schemas that it refers to to `components`, under unique
    names."""
    described = schema.model_json_schema(ref_template=f"#/components/schemas/{schema.__name__}.{{model}}")
    for name, part in described.pop("$defs", {}).items():
        components[f"{schema.__name__}.{name}"] = part
    return {"content": {"application/json": {"schema": described}}, "required": True}


def complete(description: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """Adds `components` to FastAPI's description, and removes its own error form, which is not used here."""
    for operations in description["paths"].values():
        for one in operations.values():
            one["responses"].pop("422", None)
    description["components"] = {"schemas": components}
    return description
