"""Request bodies: strict JSON with limited depth."""

from __future__ import annotations

import json
import math
from typing import Any

from pace.server.errors import ApiError

LARGE = 1 << 18
"""Size in bytes of bodies that are parsed on a worker's thread, with a Python call for each integer. Without such calls
the standard library's parser blocks all other threads until its end."""


def read_json(body: bytes, depth: int) -> Any:
    """Returns the value of `body`. Raises ApiError 400 for invalid JSON and for more than `depth` levels. Invalid are
    also NaN and infinities, duplicate names, numbers beyond float64, half surrogate pairs, and invalid UTF-8."""
    try:
        text = body.decode("utf-8")
        more = {"parse_int": _whole} if len(body) > LARGE else {}
        value = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_duplicates, **more
        )
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    except RecursionError:
        raise _too_deep(depth) from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # ours, and Python's for numbers of thousands of digits
        message = str(error) if isinstance(error, _Refused) else "a number has too many digits"
        raise ApiError(400, f"the body is not valid JSON: {message}") from None
    if text.count("[") + text.count("{") > depth:
        _check_depth(value, depth)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


class _Refused(ValueError):
    pass


def _no_constant(name: str) -> float:
    raise _Refused(f"{name} is not a JSON number")


def _whole(digits: str) -> int:
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused(f"the number {digits[:40]} is beyond float64")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _Refused(f"duplicate name {duplicate[:40]!r} in an object")
    return members


def _check_depth(value: Any, depth: int) -> None:
    level = [value]
    for _ in range(depth):
        level = [
            member
            for container in level
            if isinstance(container, (dict, list))
            for member in (container.values() if isinstance(container, dict) else container)
            if isinstance(member, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(depth)


def _too_deep(depth: int) -> ApiError:
    return ApiError(400, f"the body is nested deeper than {depth} levels")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half a surrogate pair, which is not a character") from None
