"""Helpers shared by the schemas of conversations."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from pace.server.schemas.fields import Request

THOUGHT = "reasoning_content"
"""Member with a message's thoughts, as in chat clients and templates."""


class Nested(BaseModel):
    """An object within a request, as strict as the request. Unknown members are ignored."""

    model_config = Request.model_config


class Reasoning(Nested):
    """Options of reasoning, of OpenAI's responses and of OpenRouter. Thoughts are returned unchanged, without a
    summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to the chat template."""
    enabled: bool | None = None
    """Passed to the chat template, as `enable_thinking`."""
    max_tokens: int | None = None
    """The thinking budget, in OpenRouter's words."""
    budget: int | None = None
    """The same."""


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a call in the template's terms, which are those of OpenAI's chat."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def thinking_variables(effort: str | None, enabled: bool | None = None) -> dict[str, Any]:
    """Returns the template variables of a reasoning effort, and of reasoning that is turned on or off. The effort
    "none" also turns it off, for templates without efforts."""
    given = {"reasoning_effort": effort, "enable_thinking": False if effort == "none" else enabled}
    return {name: value for name, value in given.items() if value is not None}


def budgets_of(reasoning: Reasoning | None) -> dict[str, int | None]:
    """Returns the thinking budgets in `reasoning`, by the client's names for them."""
    if reasoning is None:
        return {}
    return {"reasoning.max_tokens": reasoning.max_tokens, "reasoning.budget": reasoning.budget}


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
