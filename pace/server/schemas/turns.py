"""Helpers shared by Responses and Messages, for turns of a conversation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.schemas.fields import Request

THOUGHT = "reasoning_content"
"""Member with a message's thoughts, as in chat clients and templates."""


class Nested(BaseModel):
    """An object within a request, as strict as the request. Unknown members are ignored."""

    model_config = Request.model_config


def with_system(system: str | None, messages: list[dict[str, Any]], separator: str = "\n\n") -> list[dict[str, Any]]:
    """Returns the messages, with `system` and the system messages at the beginning merged into one: many templates
    support only one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [text for text in (system, *(message["content"] for message in messages[:first])) if text]
    if not texts:
        return messages[first:]
    return [{"role": "system", "content": separator.join(texts)}, *messages[first:]]


def add_thought(message: dict[str, Any], thought: str) -> None:
    """Adds the assistant's thoughts before a message. Each template decides if they are shown."""
    if thought := "\n".join(filter(None, [message.get(THOUGHT), thought])):
        message[THOUGHT] = thought


def check_count(param: str, values: list[Any], most: int) -> None:
    if not 1 <= len(values) <= most:
        raise ApiError(400, f"{param} must hold 1 to {most} entries, got {len(values)}", param=param)


def check_salt(cache_salt: str | None, limits: Limits) -> None:
    most = limits.name_characters
    if cache_salt is not None and not 1 <= len(cache_salt) <= most:
        raise ApiError(400, f"cache_salt must have 1 to {most} characters", param="cache_salt")
