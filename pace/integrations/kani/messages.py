"""Converts kani's messages and functions for chat templates, and events of an answer to a message of kani."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kani import AIFunction, ChatMessage, ChatRole, FunctionCall, ReasoningPart
from kani import ToolCall as KaniToolCall

from pace.llm.chat import CallEnds, Event, Text, Tool, calls_of, read_tools, thought_of

MULTIMODAL = "kani.ext.multimodal_core"
"""Module of kani's image, audio and video parts."""


def as_dict(message: ChatMessage, reasoning_key: str | None) -> dict[str, Any]:
    """Converts a message to a dict with `role`, `content`, tool calls and their results. Reasoning goes to
    `reasoning_key`; None leaves it out. Raises NotImplementedError for images, audio and video."""
    is_result = message.role is ChatRole.FUNCTION
    made: dict[str, Any] = {"role": "tool" if is_result else message.role.value, "content": text_of(message)}
    thoughts = [part.content for part in message.parts if isinstance(part, ReasoningPart)]
    if thoughts and reasoning_key is not None:
        made[reasoning_key] = "\n".join(thoughts)
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": dict(call.function)} for call in message.tool_calls
        ]
    if is_result:
        made |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
    return made


def text_of(message: ChatMessage) -> str | None:
    """Text of a message; parts that are not text are converted by `str`."""
    for part in message.parts:
        if any(kind.__module__.startswith(MULTIMODAL) for kind in type(part).__mro__):
            raise NotImplementedError(f"pace supports only text, but a message holds {type(part).__name__}")
    return message.text


def as_tools(functions: Sequence[AIFunction] | None) -> list[Tool]:
    """Converts functions to tools. Raises ValueError for an unsupported name or schema."""
    tools = [Tool(function.name, function.desc or "", function.json_schema) for function in functions or ()]
    read_tools([tool.for_template() for tool in tools], "functions")
    return tools


def as_message(events: Sequence[Event], extra: dict[str, Any]) -> ChatMessage:
    """Converts the events of an answer to a message. A call that was cut off is left out."""
    text = "".join(event.text for event in events if isinstance(event, Text)).strip()
    thought = thought_of(events)
    complete = {event.index for event in events if isinstance(event, CallEnds)}
    calls = [
        KaniToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
        for index, call in enumerate(calls_of(events))
        if index in complete
    ]
    content: Any = text if text or not calls else None
    if thought:
        content = [ReasoningPart(content=thought), *([text] if text else [])]
    return ChatMessage.assistant(content, tool_calls=calls or None, extra=extra)
