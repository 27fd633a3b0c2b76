"""Tools that a model may call, its calls, and a client's options for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = '"none", "auto", "required", a function, or allowed_tools'


class ToolError(ValueError):
    """Raised for an invalid description of tools. `place` names the field, such as `tools[3].function.name`."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"{place} {message}")
        self.place = place


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of an object: the arguments, in the order in which they are written."""
    strict: bool = False
    """True to reject a schema that a grammar cannot enforce completely, False to enforce what it can."""

    def for_template(self) -> dict[str, Any]:
        """The tool in the form of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. `arguments` is JSON text as the model wrote it, and may be cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolChoice:
    """Mode of calling: never, as the model likes, at least one tool, or the one in `names`.

    `names` are the tools that may be called; None means all.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    names: tuple[str, ...] | None = None

    def among(self, tools: Sequence[Tool]) -> list[Tool]:
        """Returns the tools that may be called, in order."""
        if self.mode == "none":
            return []
        return [tool for tool in tools if self.names is None or tool.name in self.names]


def read_tools(items: Any, place: str = "tools") -> list[Tool]:
    """Parses the tools of a request, in the nested form (`function: {name, ...}`) or the flat one (`name` next to
    `type`, optionally `input_schema` for `parameters`).

    Raises ToolError if they are not a list of tools, or if parameters are not a schema of an object. The same for a
    name that is outside `[a-zA-Z0-9_.-]{1,64}` or given twice.
    """
    if not isinstance(items, (list, tuple)):
        raise ToolError(place, f"must be a list of tools, got {_shown(items)}")
    tools: list[Tool] = []
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        function, where = _function(item, f"{place}[{index}]")
        tool = _tool(function, where)
        if tool.name in names:
            raise ToolError(f"{where}.name", f"is {tool.name!r}, which {names[tool.name]} has: names must differ")
        names[tool.name] = where
        tools.append(tool)
    return tools


def read_choice(item: Any, tools: Sequence[Tool], place: str = "tool_choice") -> ToolChoice:
    """Parses a request's choice of tools; None means "auto" if there are tools. Both forms are accepted, as in
    `read_tools`.

    Raises ToolError for an unknown kind of choice, a tool that is not in `tools`, or required calls without tools.
    """
    if item is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(item, str):
        if item not in ("none", "auto", "required"):
            raise ToolError(place, f"must be {_CHOICES}; got {_shown(item)}")
        if item == "required" and not tools:
            raise ToolError(place, 'is "required", and there are no tools')
        return ToolChoice(item if tools else "none")
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "function":
        return ToolChoice("named", (_chosen(item, tools, place),))
    if kind != "allowed_tools":
        raise ToolError(place, f"must be {_CHOICES}; got {_shown(item)}")
    nested = "allowed_tools" in item
    allowed, where = (item["allowed_tools"], f"{place}.allowed_tools") if nested else (item, place)
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        raise ToolError(f"{where}.mode", 'must be "auto" or "required"')
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise ToolError(f"{where}.tools", "must be a list of at least one tool")
    names = tuple(_chosen(one, tools, f"{where}.tools[{index}]") for index, one in enumerate(listed))
    return ToolChoice(allowed["mode"], names)


def _chosen(item: Any, tools: Sequence[Tool], place: str) -> str:
    function, where = _function(item, place)
    name = function.get("name")
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools[:8]) or "none"
        raise ToolError(f"{where}.name", f"is not a tool of this request: {_shown(name)}; tools: {known:.200}")
    return name


def _function(item: Any, place: str) -> tuple[Mapping[str, Any], str]:
    """Returns the description of a function and its place, from either form."""
    if not isinstance(item, Mapping):
        raise ToolError(place, f"must be an object, got {_shown(item)}")
    if item.get("type", "function") != "function":
        raise ToolError(f"{place}.type", f'must be "function", got {_shown(item["type"])}')
    if "function" not in item:
        return item, place
    if not isinstance(item["function"], Mapping):
        raise ToolError(f"{place}.function", f"must be an object, got {_shown(item['function'])}")
    return item["function"], f"{place}.function"


def _tool(function: Mapping[str, Any], place: str) -> Tool:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolError(f"{place}.name", f"must be 1 to 64 of a-z A-Z 0-9 _ . -, got {_shown(name)}")
    description = function.get("description")
    if not isinstance(description, (str, type(None))):
        raise ToolError(f"{place}.description", f"must be a string, got {_shown(description)}")
    strict = function.get("strict")
    if not isinstance(strict, (bool, type(None))):
        raise ToolError(f"{place}.strict", f"must be true or false, got {_shown(strict)}")
    key = "input_schema" if "input_schema" in function else "parameters"
    parameters = function.get(key)
    if parameters is None:
        return Tool(name, description or "", strict=bool(strict))
    if isinstance(parameters, Mapping):  # clients in Go write null for an empty list or object
        parameters = {name: value for name, value in parameters.items() if value is not None}
    _check_parameters(parameters, f"{place}.{key}")
    return Tool(name, description or "", {"type": "object", **parameters}, bool(strict))


def _check_parameters(parameters: Any, place: str) -> None:
    if not isinstance(parameters, Mapping):
        raise ToolError(place, f"must be a JSON schema, got {_shown(parameters)}")
    if parameters.get("type", "object") != "object":
        raise ToolError(f"{place}.type", f'must be "object", got {_shown(parameters["type"])}')
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ToolError(f"{place}.properties", f"must be an object, got {_shown(properties)}")
    for key, schema in properties.items():
        if not isinstance(schema, (Mapping, bool)):
            raise ToolError(f"{place}.properties.{key:.60}", f"must be a JSON schema, got {_shown(schema)}")
    required = parameters.get("required", [])
    if not isinstance(required, (list, tuple)) or not all(isinstance(key, str) for key in required):
        raise ToolError(f"{place}.required", f"must be a list of names, got {_shown(required)}")


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
