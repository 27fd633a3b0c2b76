"""Joins the events of a turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pace.llm.chat import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought, TurnParser


@dataclass
class Turn:
    """The joined events of a turn."""

    text: str = ""
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call."""
    ids: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


def together(events: Iterable[Event]) -> Turn:
    turn = Turn()
    for event in events:
        if isinstance(event, Text):
            turn.text += event.text
        elif isinstance(event, Thought):
            turn.thought += event.text
        elif isinstance(event, CallBegins):
            assert event.index == len(turn.calls), "indices count calls"
            turn.calls.append([event.name, ""])
            turn.ids.append(event.id)
        elif isinstance(event, ArgumentsPiece):
            assert event.index == len(turn.calls) - 1 and event.index not in turn.ended
            turn.calls[event.index][1] += event.text
        elif isinstance(event, CallEnds):
            turn.ended.append(event.index)
    return turn


def parse(parser: TurnParser, text: str, cuts: Iterable[int] = ()) -> Turn:
    """Parses the text in pieces that end at `cuts`, and returns the turn."""
    events, start = [], 0
    for cut in [*cuts, len(text)]:
        events += parser.push(text[start:cut])
        start = cut
    return together(events + parser.close())
