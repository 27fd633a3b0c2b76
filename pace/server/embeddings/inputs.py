"""Texts as clients send them: OpenAI's `input`, with llama.cpp's additions."""

from __future__ import annotations

from typing import Any

from pace.server.errors import invalid
from pace.server.schemas.fields import check_count, type_name

Text = str | list[int | str]
"""A text, or token ids; llama.cpp also takes texts among the ids."""

INPUT = "must be a string, a list of strings, a list of token ids, or a list of such lists"
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}
"""JSON schema of `input`."""


def read_input(value: Any, param: str, max_texts: int) -> tuple[list[Any], list[str]]:
    """Returns the entries of an `input`, and the place of each. The worker that tokenises them reads the entries
    (`read_text`): they may be long. Raises ApiError."""
    is_list = isinstance(value, list) and not any(map(is_token, value))
    if not is_list:
        return [value], [param]
    check_count(param, value, max_texts)
    return value, [f"{param}[{index}]" for index in range(len(value))]


def read_text(value: Any, place: str) -> Text:
    """Returns one entry of an `input`. Raises ApiError."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _read_object(value, place)
    if not isinstance(value, list):
        raise invalid(place, f"{INPUT}; got {type_name(value)}")
    if not value:
        raise invalid(place, "has no token ids")
    for index, part in enumerate(value):
        if not (isinstance(part, str) or is_token(part)):
            raise invalid(f"{place}[{index}]", f"must be a token id, a whole number of at least 0; got {_shown(part)}")
    return value


def read_texts(value: Any, param: str, max_texts: int) -> tuple[list[str], list[str]]:
    """Returns texts that are sent as one string, as strings, or as objects with a `text`, and the place of each. Raises
    ApiError."""
    if isinstance(value, str):
        return [value], [param]
    if not isinstance(value, list):
        raise invalid(param, f"must be a list of strings, got {type_name(value)}")
    check_count(param, value, max_texts)
    places = [f"{param}[{index}]" for index in range(len(value))]
    return [_text_of(entry, place) for entry, place in zip(value, places)], places


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _text_of(entry: Any, place: str) -> str:
    if isinstance(entry, dict):
        if set(entry) != {"text"}:
            raise invalid(place, "must be a string, or an object with only a text: other media are not supported")
        entry, place = entry["text"], f"{place}.text"
    if not isinstance(entry, str):
        raise invalid(place, f"must be a string, got {type_name(entry)}")
    return entry


def _read_object(value: dict[str, Any], place: str) -> str:
    """Reads Jina's objects, with `text`, and llama.cpp's: `prompt_string`, or `content` with parts."""
    for name in ("text", "prompt_string"):
        if set(value) == {name}:
            return _text_of(value[name], f"{place}.{name}")
    parts = value.get("content")
    if set(value) != {"content"} or not isinstance(parts, list):
        raise invalid(place, "must be a text, token ids, or an object with text, prompt_string, or content: [parts]")
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise invalid(f"{place}.content[{index}]", f"must have the type text; this model takes no {_shown(kind)}")
        texts.append(_text_of({"text": part.get("text")}, f"{place}.content[{index}]"))
    return "".join(texts)


def _shown(value: Any) -> str:
    return f"{value!r}"[:60]
