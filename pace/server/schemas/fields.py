"""Checked types that requests share, and what their errors become."""

from __future__ import annotations

from reprlib import repr as short_repr
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from pace.server.errors import ApiError, refused

MOST_OBJECTS = 1 << 14
"""Members of a list or an object that are looked at one by one, whatever the limits. A body has room for millions, and
the event loop would stand still over them."""


def _not_too_many(value: Any) -> Any:
    if isinstance(value, (list, dict)) and len(value) > MOST_OBJECTS:
        raise PydanticCustomError("too_many", f"may have {MOST_OBJECTS} entries, has {len(value)}")
    return value


Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
"""Lists that are given up at the first entry that is wrong."""
Bounded = BeforeValidator(_not_too_many)
"""For `Annotated`: a list or an object of at most MOST_OBJECTS."""


class Request(BaseModel):
    """A request's body. Types are strict ("5" is no number); what no field knows is kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


Parsed = TypeVar("Parsed", bound=Request)


def parse(
    schema: type[Parsed], body: Any, refusals: dict[str, str], inert: frozenset[str] = frozenset()
) -> tuple[Parsed, list[str]]:
    """The request that `body` (a JSON object) is, and the names of fields that nobody knows.

    `refusals`: fields that are known and not served, and why; null, false and empty ones ask for nothing. `inert`:
    fields that change nothing here. Raises ApiError 400 that names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type_name(body)}")
    for name, why in refusals.items():
        if body.get(name) not in (None, False, [], {}, ""):
            raise refused(name, why)
    try:
        request = schema.model_validate(body)
    except ValidationError as error:
        raise as_api_error(error) from None
    known = inert | refusals.keys()
    return request, [name for name in request.model_extra or {} if name not in known]


def as_api_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong, named by its place in the body."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [part for part in first["loc"] if not _is_branch(part)]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    got = short_repr(first.get("input"))
    why = "is missing" if first["type"] == "missing" else f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got}"
    return ApiError(400, f"{place or 'the body'}: {why}", param=place or None)


def _is_branch(part: str | int) -> bool:
    """Whether a part of a path names a branch of a union, and nothing of the body."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())


def type_name(value: Any) -> str:
    """As JSON calls it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
