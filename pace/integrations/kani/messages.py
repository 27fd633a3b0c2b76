"""Converts kani's messages and functions for chat templates, and events of an answer to a message of kani."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kani import AIFunction, ChatMessage, ChatRole, FunctionCall, ReasoningPart
from kani import ToolCall as KaniToolCall

from pace.llm.chat import CallEnds, Event, Text, Tool, calls_of, read_tools, thought_of
from pace.llm.processors.processor import MEDIA_LISTS
from pace.media.images import load_rgb

MULTIMODAL = "kani.ext.multimodal_core"
"""Module of kani's image, audio and video parts."""
_MEDIA = {"ImagePart": "image", "AudioPart": "audio"}
"""Parts that models take, and their kinds of media."""
_LOADING = threading.Lock()
"""Held while pixels are copied: Pillow reads the file of an image on first use, and chats may share an image."""


def as_dict(message: ChatMessage, reasoning_key: str | None, copies_media: bool = True) -> dict[str, Any]:
    """Converts a message to a dict with `role`, `content`, tool calls and their results. Reasoning goes to
    `reasoning_key`; None leaves it out.

    kani closes an image with its message. So pixels are copied, unless `copies_media` is false: then the content is
    only for counting. Raises NotImplementedError for video, and ValueError for an image that cannot be read."""
    is_result = message.role is ChatRole.FUNCTION
    content: Any = text_of(message)
    if any(_media_kind(part) for part in message.parts):
        content = [_as_part(part, copies_media) for part in message.parts if not isinstance(part, ReasoningPart)]
    made: dict[str, Any] = {"role": "tool" if is_result else message.role.value, "content": content}
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
    """Text of a message, without images and sound; other parts are converted by `str`. Raises NotImplementedError for
    video."""
    if not any(_media_kind(part) for part in message.parts):
        return message.text
    return "".join(str(part) for part in message.parts if _media_kind(part) is None)


def media_of(messages: Sequence[ChatMessage]) -> dict[str, list[Any]]:
    """Images and sound of messages in order, as `LLMModel.generate` takes them: `images` and `audio`, as far as there
    are any. Pixels are copied. Raises what `as_dict` raises."""
    parts = [_as_part(part, True) for message in messages for part in message.parts if _media_kind(part)]
    found = {name: [part[kind] for part in parts if part["type"] == kind] for name, kind in MEDIA_LISTS.items()}
    return {name: media for name, media in found.items() if media}


def _media_kind(part: Any) -> str | None:
    """ "image" or "audio" for such a part; None for others. Raises NotImplementedError for other parts of kani's
    multimodal package. That package is an extra, and a part exists only if it was imported."""
    names = [kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith(MULTIMODAL)]
    kind = next((_MEDIA[name] for name in names if name in _MEDIA), None)
    if names and kind is None:
        raise NotImplementedError(f"pace takes text, images and sound, but a message holds {type(part).__name__}")
    return kind


def _as_part(part: Any, copies_media: bool) -> dict[str, Any]:
    """Converts a part of a message to a part of a chat."""
    match _media_kind(part):
        case "image":
            return {"type": "image", "image": _pixels(part.image) if copies_media else part.image}
        case "audio":
            return {"type": "audio", "audio": (part.as_ndarray(part.sample_rate), part.sample_rate)}
    return {"type": "text", "text": str(part)}


def _pixels(image: Any) -> Any:
    """A copy of a PIL image, in mode RGB."""
    with _LOADING:
        loaded = load_rgb(image)
        return loaded.copy() if loaded is image else loaded


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
