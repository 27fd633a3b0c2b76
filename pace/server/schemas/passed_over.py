"""Input of Codex and Claude Code for services that pace lacks: tools that are not the client's functions, and their
traces in a conversation. It is ignored, so that these clients run unchanged; the log names each kind once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OPENAI_TOOLS = ("custom", "namespace", "web_search", "tool_search")
"""Types of tools. Types of `web_search` may have a suffix: `web_search_preview`, `web_search_2025_08_26`."""
ANTHROPIC_TOOLS = ("web_search", "tool_search_tool")
"""Types of tools; a date may follow. In Anthropic's API, `custom` is a function of the client."""
ITEMS = ("custom_tool_call", "custom_tool_call_output", "web_search_call", "tool_search_call", "tool_search_output")
"""Types of items in the input of a response."""
BLOCKS = ("tool_reference", "server_tool_use", "web_search_tool_result", "tool_search_tool_result")
"""Types of blocks in Anthropic's turns, and in results of tools."""

_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE)


def without_billing(text: str) -> str:
    """Returns a system prompt of Claude Code without its first line. The line differs in every request and means
    nothing to a model. With it, no prompt would share a prefix with the one before."""
    return _BILLING.sub("", text)


class PassedOver:
    """Records what is ignored in one request, for the log. Contains no text of the client."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def field(self, name: str, value: Any) -> None:
        """Records a field of the request, if it is set."""
        if value:
            self._names[name] = None

    def is_passed(self, what: str, kind: Any, kinds: tuple[str, ...]) -> bool:
        """True if a part `what` ("items", say) of type `kind` is ignored; records it."""
        found = _kind_of(kind, kinds)
        if found is not None:
            self._names[f"{what} of the type {found}"] = None
        return found is not None

    def tools(self, tools: list[Any] | None, kinds: tuple[str, ...]) -> list[Any] | None:
        """Returns the other tools."""
        if tools is None:
            return None
        return [tool for tool in tools if not self.is_passed("tools", _type_of(tool), kinds)]


def without_tools(choice: Any, kinds: tuple[str, ...]) -> Any:
    """Returns OpenAI's `tool_choice` for the remaining tools."""
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
