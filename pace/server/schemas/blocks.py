"""Anthropic's turns, which consist of blocks, and its tools, in the template's terms."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from pace.server.errors import invalid, unsupported
from pace.server.limits import Limits
from pace.server.schemas.description import CONTENT
from pace.server.schemas.media import RequestMedia, joined
from pace.server.schemas.passed_over import BLOCKS, PassedOver, without_billing
from pace.server.schemas.turns import THOUGHT, Nested, add_thought, tool_call

_NO_TEXT = {"type": "text", "text": ""}
"""Placeholder for a block without text, so that other blocks keep their indices."""


class Turn(Nested):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, WithJsonSchema(CONTENT)]


class Choice(Nested):
    """Tool choice of a request."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_openai(self, passed_over: Collection[str] = ()) -> Any:
        """Returns the choice in OpenAI's form for `read_choice`; "auto" for a tool that is ignored."""
        if self.type == "tool" and self.name in passed_over:
            return "auto"
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


def read_turns(turns: list[Turn], limits: Limits, passed: PassedOver) -> list[dict[str, Any]]:
    """Returns the messages in the template's terms. Adjacent turns of one role become one message. Each result of a
    tool is a separate message, before the text of its turn. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    media = RequestMedia(limits)
    for index, turn in enumerate(turns):
        for message in _messages(turn, f"messages[{index}].content", limits, media, passed):
            last = messages[-1] if messages else None
            if last is None or message["role"] == "tool" or last["role"] != message["role"]:
                messages.append(message)
                continue
            last["content"] = joined(last["content"], message["content"], "\n")
            add_thought(last, message.get(THOUGHT, ""))
            if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
                last["tool_calls"] = calls
    return messages


def system_text(content: Any, place: str, limits: Limits, separator: str = "") -> str:
    """Returns the text of a system prompt, without the part that differs in each request. Raises ApiError."""
    text = RequestMedia(limits).content(content, place, False, separator)
    if not isinstance(content, list):
        return without_billing(text)
    left = [without_billing(block["text"]) for block in content]
    return separator.join(text for text, block in zip(left, content) if text or not block["text"])


def check_tools(tools: list[Any] | None) -> None:
    """Raises ApiError for tools that are not the client's own; `read_tools` checks the others."""
    for index, tool in enumerate(tools or ()):
        kind = _type(tool)
        if kind not in (None, "custom"):
            raise unsupported(f"tools[{index}].type", f"only the client's own tools are supported, not {kind!r:.60}")


def for_openai(tools: list[Any] | None) -> list[Any] | None:
    """Returns the tools without their type, which differs from OpenAI's."""
    if tools is None:
        return None
    return [{k: v for k, v in tool.items() if k != "type"} if isinstance(tool, dict) else tool for tool in tools]


def _messages(turn: Turn, place: str, limits: Limits, media: RequestMedia, passed: PassedOver) -> list[dict[str, Any]]:
    """Returns a turn as messages: the results of tools, then the rest. Returns none for a turn that is ignored."""
    content = turn.content
    if content is None:
        raise invalid(place, "is missing")
    if turn.role == "system":
        text = system_text(content, place, limits)
        return [{"role": turn.role, "content": text}] if text else []
    if not isinstance(content, list):
        return [{"role": turn.role, "content": media.content(content, place, False)}]
    results, calls, texts, thoughts, num_passed = [], [], [], [], 0
    for index, block in enumerate(content):
        kind, where = _type(block), f"{place}[{index}]"
        if kind == "tool_result" and turn.role == "user":
            results.append(_result(block, where, limits, media, passed))
        elif kind == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, where))
        elif kind == "thinking" and turn.role == "assistant":
            thoughts.append(_thought(block, where))
        elif passed.is_passed("blocks", kind, BLOCKS):
            num_passed += 1
        elif kind != "redacted_thinking" or turn.role != "assistant":
            texts.append(block)
            continue
        texts.append(_NO_TEXT)
    if len(results) + len(calls) > limits.tools:
        raise invalid(place, f"may have at most {limits.tools} calls or results")
    if num_passed and num_passed == len(content):
        return []
    max_parts = limits.parts + len(results) + len(calls) + num_passed
    content = media.content(texts, place, turn.role == "user", max_parts=max_parts)
    message = {"role": turn.role, "content": content, **({"tool_calls": calls} if calls else {})}
    add_thought(message, "\n".join(thoughts))
    return [*results, message] if content or not results else results


def _thought(block: dict[str, Any], place: str) -> str:
    _check_text(block, "thinking", place)
    return block["thinking"]


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    for name in ("id", "name"):
        _check_text(block, name, place)
    if not isinstance(block.get("input"), dict):
        raise invalid(f"{place}.input", "must be an object")
    return tool_call(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))


def _result(
    block: dict[str, Any], place: str, limits: Limits, media: RequestMedia, passed: PassedOver
) -> dict[str, Any]:
    """Returns the result of a tool. Templates have no errors, so its text begins with "Error"."""
    _check_text(block, "tool_use_id", place)
    content, num_passed = block.get("content"), 0
    if isinstance(content, list):
        kept = [_NO_TEXT if passed.is_passed("blocks", _type(part), BLOCKS) else part for part in content]
        content, num_passed = kept, sum(part is _NO_TEXT for part in kept)
    content = media.content(content, f"{place}.content", True, max_parts=limits.parts + num_passed)
    if block.get("is_error"):
        content = f"Error: {content}" if isinstance(content, str) else joined("Error:", content, " ")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _check_text(block: dict[str, Any], name: str, place: str) -> None:
    if not isinstance(block.get(name), str):
        raise invalid(f"{place}.{name}", "must be a string")
