"""What Codex and Claude Code send for services that pace does not have: tools that others run or that are no functions,
and their traces in a conversation. They are passed over, so that these clients run unchanged; the log names each once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OPENAI_TOOLS = ("custom", "namespace", "web_search", "tool_search")
"""Types of tools. Those of `web_search` have further words after it: `web_search_preview`, `web_search_2025_08_26`."""
ANTHROPIC_TOOLS = ("web_search", "tool_search_tool")
"""Likewise, with a date. Anthropic calls a function of the client's own `custom`."""
ITEMS = ("custom_tool_call", "custom_tool_call_output", "web_search_call", "tool_search_call", "tool_search_output")
"""Types of items in the input of a response."""
BLOCKS = ("tool_reference", "server_tool_use", "web_search_tool_result", "tool_search_tool_result")
"""Types of blocks in turns of Anthropic's, and in results of tools."""

_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE)


def without_billing(text: str) -> str:
    """A system prompt of Claude Code's without its first line. That differs from request to request, and says nothing to
    a model: with it no prompt would begin like the one before, as the prefix cache needs it."""
    return _BILLING.sub("", text)


class PassedOver:
    """Takes note of what is passed over in one request, for the log. No word of the client's is among it."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def field(self, name: str, value: Any) -> None:
        """A field of the request, where it asks for something."""
        if value:
            self._names[name] = None

    def is_passed(self, what: str, kind: Any, kinds: tuple[str, ...]) -> bool:
        """Whether the `what` ("items", say) of the type `kind` is passed over."""
        found = _kind_of(kind, kinds)
        if found is not None:
            self._names[f"{what} of the type {found}"] = None
        return found is not None

    def tools(self, tools: list[Any] | None, kinds: tuple[str, ...]) -> list[Any] | None:
        """The other tools."""
        if tools is None:
            return None
        return [tool for tool in tools if not self.is_passed("tools", _type_of(tool), kinds)]


def without_tools(choice: Any, kinds: tuple[str, ...]) -> Any:
    """OpenAI's `tool_choice` for the tools that are left."""
    if _kind_of(_type_of(choice), kinds) is not None:
        return "auto"
    if _type_of(choice) != "allowed_tools":
        return choice
    if isinstance(nested := choice.get("allowed_tools"), Mapping):
        return {**choice, "allowed_tools": {**nested, "tools": _left(nested.get("tools"), kinds)}}
    return {**choice, "tools": _left(choice.get("tools"), kinds)}


def _left(tools: Any, kinds: tuple[str, ...]) -> Any:
    return [tool for tool in tools if _kind_of(_type_of(tool), kinds) is None] if isinstance(tools, list) else tools


def _type_of(item: Any) -> Any:
    return item.get("type") if isinstance(item, Mapping) else None


def _kind_of(kind: Any, kinds: tuple[str, ...]) -> str | None:
    if not isinstance(kind, str):
        return None
    return next((name for name in kinds if kind == name or kind.startswith(f"{name}_") and "search" in name), None)
