"""Requests, and checks of answers against OpenAI's description of its API."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

import httpx
from jsonschema import Draft202012Validator

URL = os.environ["PACE_URL"]


@cache
def description() -> dict[str, Any]:
    with open(os.environ["OPENAI_SPEC"]) as file:
        return nullable(json.load(file))


def nullable(value: Any) -> Any:
    """The description with OpenAPI 3.0's `nullable` expressed in JSON schema, which has no such keyword."""
    if isinstance(value, list):
        return [nullable(item) for item in value]
    if not isinstance(value, dict):
        return value
    members = {name: nullable(item) for name, item in value.items()}
    if members.get("nullable") is True:
        del members["nullable"]
        return {"anyOf": [members, {"type": "null"}]}
    return members


def check(value: Any, schema: str) -> None:
    components = {"components": description()["components"]}
    errors = Draft202012Validator({"$ref": f"#/components/schemas/{schema}", **components}).iter_errors(value)
    found = [f"{error.json_path}: {error.message[:300]}" for error in errors]
    assert not found, (found, value)


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{URL}/v1{path}", json=body, timeout=60)
