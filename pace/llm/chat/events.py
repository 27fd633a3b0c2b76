"""What a turn of the assistant consists of, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pace.llm.chat.tools import ToolCall


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of the tool `name`. `index` counts the calls of a turn."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """A piece of the arguments of call `index`: together they are JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """Call `index` is whole."""

    index: int


Event = Text | Thought | CallBegins | ArgumentsPiece | CallEnds


def thought_of(events: Iterable[Event]) -> str:
    """The thoughts among the events."""
    return "".join(event.text for event in events if isinstance(event, Thought))


def calls_of(events: Iterable[Event]) -> list[ToolCall]:
    """The calls among the events; the arguments of one that was cut off are cut."""
    names: dict[int, tuple[str, str]] = {}
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallBegins):
            names[event.index], arguments[event.index] = (event.id, event.name), ""
        elif isinstance(event, ArgumentsPiece):
            arguments[event.index] += event.text
    return [ToolCall(id, name, arguments[index]) for index, (id, name) in names.items()]
