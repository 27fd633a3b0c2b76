"""Items of a response's input: messages, function calls, and their results."""

from __future__ import annotations

from typing import Any, Literal

from pace.server.errors import ApiError, invalid, unsupported
from pace.server.limits import Limits
from pace.server.schemas.media import RequestMedia
from pace.server.schemas.passed_over import ITEMS, PassedOver
from pace.server.schemas.turns import Nested, add_thought, tool_call

NOT_STORED = "responses are not stored here; send the whole conversation as input"


class Item(Nested):
    """One item of the input. An item without a type is a message."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Any = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    """JSON text of a call; an object in ignored items."""
    output: Any = None
    summary: Any = None
    """Summary that clients got instead of hidden thoughts."""


def read_items(items: list[Item], limits: Limits, passed: PassedOver) -> list[dict[str, Any]]:
    """Returns the items as messages in the template's terms. Calls are added to the assistant's message before them,
    and thoughts to the message after them. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    media = RequestMedia(limits)
    thought = ""
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if passed.is_passed("items", item.type, ITEMS):
            continue
        if item.type == "reasoning":
            thought = "\n".join(filter(None, [thought, _thought(item)]))
            continue
        if item.type == "function_call":
            _add_call(messages, _call(item, place), place, limits)
        elif item.type == "function_call_output":
            messages.append(_result(item, place, media))
        elif item.type == "message":
            messages.append(_message(item, place, media))
        elif item.type == "item_reference":
            raise unsupported(place, f"{NOT_STORED}, not references")
        else:
            raise unsupported(place, f"only messages and function calls are supported, got type {item.type[:40]!r}")
        if messages[-1]["role"] == "assistant":
            add_thought(messages[-1], thought)
        thought = ""
    return messages


def _message(item: Item, place: str, media: RequestMedia) -> dict[str, Any]:
    _check_members(item, place, "role", "content")
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": media.content(item.content, f"{place}.content", role == "user")}


def _thought(item: Item) -> str:
    """Returns the text of a reasoning item: its content, else its summary."""
    parts = item.content or item.summary
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _call(item: Item, place: str) -> dict[str, Any]:
    _check_members(item, place, "call_id", "name", "arguments")
    if not isinstance(item.arguments, str):
        raise invalid(f"{place}.arguments", "must be a string")
    return tool_call(item.call_id, item.name, item.arguments)


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any], place: str, limits: Limits) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append(call)
    if len(calls) > limits.tools:
        raise ApiError(400, f"{place}: at most {limits.tools} calls may follow each other", param=place)


def _result(item: Item, place: str, media: RequestMedia) -> dict[str, Any]:
    _check_members(item, place, "call_id", "output")
    content = media.content(item.output, f"{place}.output", True)
    return {"role": "tool", "tool_call_id": item.call_id, "content": content}


def _check_members(item: Item, place: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise invalid(f"{place}.{name}", "is missing")
