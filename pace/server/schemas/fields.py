"""Checked types shared by requests, and conversion of their errors."""

from __future__ import annotations

from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from pace.server.errors import ApiError, invalid, unsupported
from pace.server.limits import Limits

MAX_OBJECTS = 1 << 14
"""Maximum members of a list or an object that are checked one by one, regardless of the limits. A body has room for
millions, which would block the event loop."""


def _not_too_many(value: Any) -> Any:
    if isinstance(value, (list, dict)) and len(value) > MAX_OBJECTS:
        raise PydanticCustomError("too_many", f"may have at most {MAX_OBJECTS} entries, has {len(value)}")
    return value


Strings = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
"""Lists whose check stops at the first invalid entry."""
Bounded = BeforeValidator(_not_too_many)
"""Annotation for a list or an object of at most MAX_OBJECTS members."""


class Request(BaseModel):
    """Body of a request. Types are strict ("5" is no number); unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    UNSUPPORTED: ClassVar[dict[str, str]] = {}
    """Known fields that are not supported, with the reasons; null, false and empty values are accepted."""
    UNUSED: ClassVar[frozenset[str]] = frozenset()
    """Fields that have no effect here and need no warning."""

    model: str | None = None


Parsed = TypeVar("Parsed", bound=Request)


def parse(schema: type[Parsed], body: Any) -> tuple[Parsed, list[str]]:
    """Returns the request in `body` (a JSON object), and the names of unknown fields. Raises ApiError 400 that names
    the field."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type_name(body)}")
    for name, why in schema.UNSUPPORTED.items():
        if body.get(name) not in (None, False, [], {}, ""):
            raise unsupported(name, why)
    try:
        request = schema.model_validate(body)
    except ValidationError as error:
        raise as_api_error(error) from None
    known = schema.UNUSED | schema.UNSUPPORTED.keys()
    return request, [name for name in request.model_extra or {} if name not in known]


def check_range(param: str, value: int | None, minimum: int, maximum: int) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise invalid(param, f"must be from {minimum} to {maximum}, got {value}")


def check_count(param: str, values: list[Any], maximum: int) -> None:
    if not 1 <= len(values) <= maximum:
        raise invalid(param, f"must have 1 to {maximum} entries, got {len(values)}")


def check_salt(cache_salt: str | None, limits: Limits) -> None:
    if cache_salt is not None and not 1 <= len(cache_salt) <= limits.name_characters:
        raise invalid("cache_salt", f"must have 1 to {limits.name_characters} characters")


def as_api_error(error: ValidationError) -> ApiError:
    """Returns an ApiError for the first error, with its path in the body."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [part for part in first["loc"] if not _is_branch(part)]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    got = short_repr(first.get("input"))
    why = "is missing" if first["type"] == "missing" else f"{first['msg'][0].lower()}{first['msg'][1:]}, got {got}"
    return ApiError(400, f"{place or 'the body'}: {why}", param=place or None)


def _is_branch(part: str | int) -> bool:
    """True if a part of a path names a branch of a union, and no part of the body."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())


def type_name(value: Any) -> str:
    """Returns the JSON name of a value's type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
