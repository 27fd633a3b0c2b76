"""Helpers shared by the schemas of conversations."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pace.server.schemas.fields import Request

THOUGHT = "reasoning_content"
"""Member with a message's thoughts, as in chat clients and templates."""


class Nested(BaseModel):
    """An object within a request, as strict as the request. Unknown members are ignored."""

    model_config = Request.model_config


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a call in the template's terms, which are those of OpenAI's chat."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the template variables of a reasoning effort. "none" also turns reasoning off, for templates without
    efforts."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def with_system(system: str | None, messages: list[dict[str, Any]], separator: str = "\n\n") -> list[dict[str, Any]]:
    """Returns the messages, with `system` and the system messages at the beginning merged into one: many templates
    support only one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [text for text in (system, *(message["content"] for message in messages[:first])) if text]
    if not texts:
        return messages[first:]
    return [{"role": "system", "content": separator.join(texts)}, *messages[first:]]


def add_thought(message: dict[str, Any], thought: str) -> None:
    """Adds the assistant's thoughts before a message. Each template decides whether they are shown."""
    if thought := "\n".join(filter(None, [message.get(THOUGHT), thought])):
        message[THOUGHT] = thought
