"""Bodies about adapters: `POST /lora-adapters`, and llama.cpp's `lora` of a request."""

from __future__ import annotations

import math
from typing import Any

from pace.server.errors import invalid
from pace.server.limits import Limits
from pace.server.schemas.fields import Request, check_count

MAX_PATH = 4096


class AdapterRequest(Request):
    """An adapter to load."""

    name: str
    """Name in requests."""
    path: str
    """Path below the server's folder of adapters (`--lora-dir`)."""

    def check(self, limits: Limits) -> None:
        """Raises ApiError for a name or path that is too long."""
        for field, maximum in (("name", limits.name_characters), ("path", MAX_PATH)):
            if not 0 < len(getattr(self, field)) <= maximum:
                raise invalid(field, f"must have 1 to {maximum} characters")


def read_scales(lora: list[Any] | None, limits: Limits) -> tuple[tuple[int, float], ...] | None:
    """Returns (number, weight) of the adapters in llama.cpp's `lora`; None if it is not given. Raises ApiError."""
    if lora is None:
        return None
    if lora:
        check_count("lora", lora, limits.adapters)
    found = []
    for index, item in enumerate(lora):
        number, scale = (item.get("id"), item.get("scale")) if isinstance(item, dict) else (None, None)
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool) and math.isfinite(scale)
        if type(number) is not int or not is_number or item.keys() - {"id", "scale"}:
            raise invalid(f"lora[{index}]", 'must be an object such as {"id": 0, "scale": 1.0}')
        found.append((number, float(scale)))
    if len({number for number, _ in found}) < len(found):
        raise invalid("lora", "names an adapter twice")
    return tuple(found)
