"""Events of an assistant's turn."""

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
    """A piece of the model's reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The beginning of a call of the tool `name`. `index` counts the calls of a turn."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """A piece of the arguments of call `index`; all pieces together are JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The end of call `index`, which is complete."""

    index: int


Event = Text | Thought | CallBegins | ArgumentsPiece | CallEnds


def thought_of(events: Iterable[Event]) -> str:
    """Joins the reasoning in the events."""
    return "".join(event.text for event in events if isinstance(event, Thought))


def calls_of(events: Iterable[Event]) -> list[ToolCall]:
    """Collects the calls in the events. A call that was cut off has incomplete arguments."""
    names: dict[int, tuple[str, str]] = {}
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallBegins):
            names[event.index], arguments[event.index] = (event.id, event.name), ""
        elif isinstance(event, ArgumentsPiece):
            arguments[event.index] += event.text
    return [ToolCall(id, name, arguments[index]) for index, (id, name) in names.items()]
