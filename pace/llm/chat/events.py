"""What a turn of the assistant consists of, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


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
