"""Parses an assistant's turn while it is generated, into reasoning, text, and calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from enum import Enum

from pace.llm.chat.arguments import Reader, State
from pace.llm.chat.arguments.tagged_arguments import held_back
from pace.llm.chat.events import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought
from pace.llm.chat.format import ToolFormat
from pace.llm.chat.ids import IdRule
from pace.llm.chat.literals import MORE, NO, Match, blank, match
from pace.llm.chat.reasoning import Reasoning
from pace.llm.chat.tools import Tool
from pace.llm.chat.untagged import FENCE, SIGNS, Scans, Untagged, find_untagged

BLANKS = " \t\r\n"


class Place(Enum):
    """Position of the parser within a turn."""

    START = "start"
    THOUGHT = "thought"
    PREAMBLE = "preamble"
    """Within text whose end is marked, and which is not the end of the turn."""
    BODY = "body"
    """At the beginning of the answer, after any reasoning and preambles."""
    TEXT = "text"
    MARKED_TEXT = "marked text"
    """Within an answer whose end is marked."""
    ARGUMENTS = "arguments"
    TAIL = "tail"
    AFTER_CALL = "after a call"


class TurnParser:
    """Converts generated text, which contains special tokens by name, to events.

    The joined events do not depend on how the text is split between calls of `push`. Text that only resembles a call is
    returned as text. A call that becomes invalid after its name gets no end event, and the rest is text. Without
    `tools` no calls are parsed. Whitespace after the markers of reasoning is dropped, and line ends before the
    closing one. So is whitespace between the last call and the end.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Sequence[Tool],
        reasoning: Reasoning | None = None,
        make_id: IdRule | None = None,
        max_untagged: int | None = None,
    ) -> None:
        """`make_id` replaces the format's rule for call ids. `max_untagged`: number of calls up to which calls without
        the marks of the format are accepted (`untagged.py`); None for no limit."""
        self._format = format
        self._tools = {tool.name: tool for tool in tools}
        self._reasoning = reasoning
        self._make_id = make_id or format.make_id
        self._first = format.opening + format.head
        self._next = None if format.between is None else format.between + format.head
        self._held = ""
        """Text that has arrived but is in no event yet."""
        self._skip_blank = False
        self._max_untagged = 0 if format.answers_are_marked else math.inf if max_untagged is None else max_untagged
        self._between_calls: str | None = None
        """Characters that are dropped between a call and another call or the end; None if the last event was not a
        call."""
        self._is_line_start = True
        """True if only whitespace has come since the beginning of the line."""
        self._scans: Scans = {}
        """Scanned values in the held text."""
        self._is_in_block = False
        """True within a code block, where a call without marks is only an example."""
        self._final = False
        self._calls = 0
        self._reader: Reader | None = None
        self._place = Place.START
        self._before = [(reasoning.opening, Place.THOUGHT)] if reasoning is not None else []
        self._before += [(format.preamble[0], Place.PREAMBLE)] if format.preamble[0] else []
        if reasoning is not None and reasoning.begun:
            self._begin(Place.THOUGHT)
        self._steps = {
            Place.START: self._start, Place.THOUGHT: self._thought, Place.PREAMBLE: self._preamble,
            Place.BODY: self._body, Place.TEXT: self._text, Place.MARKED_TEXT: self._marked_text,
            Place.ARGUMENTS: self._arguments, Place.TAIL: self._tail, Place.AFTER_CALL: self._after_call,
        }  # fmt: skip

    @property
    def is_thinking(self) -> bool:
        """True if the next text belongs to reasoning."""
        return self._place is Place.THOUGHT

    def push(self, text: str) -> list[Event]:
        """Adds text and returns its events."""
        self._held += text
        return list(_joined(self._events()))

    def close(self) -> list[Event]:
        """Ends the turn and returns the remaining events. Nothing may be pushed afterwards."""
        self._final = True
        events = list(_joined(self._events()))
        self._held = ""
        return events

    def _events(self) -> Iterable[Event]:
        """Runs the parser until it needs more text."""
        while True:
            if self._skip_blank:
                self._held = self._held[blank(self._held) :]
                if not self._held:
                    return
                self._skip_blank = False
            before = self._place, len(self._held)
            yield from self._steps[self._place]()
            if (self._place, len(self._held)) == before:
                return

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        if length:
            self._scans = {}
        return taken

    def _begin(self, place: Place) -> None:
        """Moves to a place where leading whitespace is dropped."""
        self._place, self._skip_blank = place, True

    def _match(self, literal: str, start: int = 0, names: Collection[str] = ()) -> Match:
        """Calls `match`; at the end of the turn MORE becomes NO."""
        found = match(literal, self._held, start, names)
        if found.end == MORE and self._final:
            found.end = NO
        return found

    def _start(self) -> Iterable[Event]:
        """Parses the optional parts before the answer."""
        waits = False
        for marker, place in self._before:
            found = self._match(marker, blank(self._held))
            if found.end >= 0:
                self._take(found.end)
                self._begin(place)
                return ()
            waits |= found.end == MORE
        if not waits:
            self._place = Place.BODY
        return ()

    def _thought(self) -> Iterable[Event]:
        text, ended = self._up_to(self._reasoning.closing)
        whole = text.rstrip("\n")
        if not ended and not self._final:  # line ends may come before the closing marker
            self._held, text = text[len(whole) :] + self._held, whole
        yield Thought(whole if ended else text)
        if ended:
            self._begin(Place.START if self._reasoning.repeats else Place.BODY)

    def _preamble(self) -> Iterable[Event]:
        text, ended = self._up_to(self._format.preamble[1])
        yield Text(text)
        if ended:
            self._begin(Place.START)

    def _up_to(self, marker: str) -> tuple[str, bool]:
        """Takes the text before a marker, and the marker if it has arrived."""
        end = self._held.find(marker)
        if end >= 0:
            text = self._take(end)
            self._take(len(marker))
            return text, True
        return self._take(len(self._held) - (0 if self._final else held_back(self._held, marker))), False

    def _body(self) -> Iterable[Event]:
        """Parses the beginning of an answer, which decides between calls and text if the format does not mix them."""
        if self._format.anywhere and not self._format.answers_are_marked:
            self._place = Place.TEXT
            return
        start = blank(self._held)
        call = self._match(self._first, start, self._tools)
        if call.end >= 0:
            yield from self._call(call)
            return
        mark = self._format.reply[0].strip()
        marked = self._match(mark, start) if mark else None
        if marked is not None and marked.end >= 0:
            self._take(marked.end)
            self._place = Place.MARKED_TEXT if self._format.reply[1] else Place.TEXT
        elif call.end != MORE and (marked is None or marked.end != MORE):
            self._place, self._skip_blank = Place.TEXT, self._format.answers_are_marked and not mark

    def _text(self) -> Iterable[Event]:
        """Parses text up to a possible call."""
        if self._between_calls is not None and not self._held.strip(self._between_calls):
            if self._final:
                self._take(len(self._held))
            return
        if not self._tools:
            yield self._said(len(self._held))
            return
        tagged = self._format.trigger if self._format.anywhere else ""
        for start in self._signs(tagged):
            is_tagged = tagged and self._held.startswith(tagged, start)
            call = self._match(self._first, start, self._tools) if is_tagged else Match(NO, {})
            if call.end != NO:
                yield self._said(start, call.end)
                if call.end >= 0:
                    call.end -= start
                    yield from self._call(call)
                return
            if not self._begins_line(start):
                continue
            found = self._untagged(start)
            if found.end != NO:
                yield self._said(start, found.end)
                if found.end >= 0:
                    self._take(found.end - start)
                    yield from self._whole_calls(found)
                return
            if self._held.startswith(FENCE, start):
                self._is_in_block = not self._is_in_block
                yield self._said(start + len(FENCE))
                return
        held = held_back(self._held, tagged) if tagged and not self._final else 0
        yield self._said(len(self._held) - held, MORE if held else NO)

    def _signs(self, tagged: str) -> Iterable[int]:
        """Positions at which a call may begin."""
        first = set(tagged[:1] + (SIGNS if self._calls < self._max_untagged else ""))
        return (at for at, character in enumerate(self._held) if character in first)

    def _begins_line(self, start: int) -> bool:
        """True if only whitespace, or a call, precedes `start` in its line."""
        line = self._held.rfind("\n", 0, start) + 1
        blanks = BLANKS if line or self._between_calls is None else self._between_calls
        return (self._is_line_start or line > 0) and not self._held[line:start].strip(blanks)

    def _untagged(self, start: int) -> Untagged:
        """Finds calls without marks, up to the accepted number."""
        if self._held[start] not in SIGNS or self._calls >= self._max_untagged:
            return Untagged(NO)
        if self._is_in_block:
            is_cut = FENCE.startswith(self._held[start:]) and self._held[start:] != FENCE
            return Untagged(MORE if is_cut and not self._final else NO)
        found = find_untagged(self._held, start, self._format, self._tools, self._final, self._scans)
        return Untagged(NO) if self._calls + len(found.calls) > self._max_untagged else found

    def _whole_calls(self, found: Untagged) -> Iterable[Event]:
        for name, arguments in found.calls:
            index = self._calls
            self._calls += 1
            yield CallBegins(index, self._make_id(name, index), name)
            yield ArgumentsPiece(index, arguments)
            yield CallEnds(index)
        self._between_calls, self._is_line_start = BLANKS + ",", True

    def _said(self, length: int, call_end: int = NO) -> Text:
        """Takes `length` characters of text. `call_end`: end of a call that follows, MORE if one may follow, NO if none
        does. Separators between two calls are not text."""
        if call_end != NO and self._between_calls is not None and not self._held[:length].strip(self._between_calls):
            self._take(length if call_end >= 0 else 0)
            return Text("")
        text = self._take(length)
        if text:
            line = text.rpartition("\n")
            self._is_line_start = (self._is_line_start or bool(line[1])) and not line[2].strip()
            self._between_calls = None
        return Text(text)

    def _marked_text(self) -> Iterable[Event]:
        text, ended = self._up_to(self._format.reply[1])
        yield Text(text)
        if ended:
            self._begin(Place.TEXT)

    def _call(self, found: Match) -> Iterable[Event]:
        """Starts a call, after matching everything before its arguments."""
        self._take(found.end)
        name, index = found.holes["NAME"], self._calls
        self._calls += 1
        self._reader = self._format.arguments.reader(self._tools[name])
        self._place, self._is_line_start = Place.ARGUMENTS, False
        yield CallBegins(index, found.holes.get("ID") or self._make_id(name, index), name)

    def _arguments(self) -> Iterable[Event]:
        reading = self._reader.read(self._held)
        self._take(reading.used)
        yield ArgumentsPiece(self._calls - 1, reading.piece)
        if reading.state is State.DONE:
            self._place = Place.TAIL
        elif reading.state is State.BROKEN:
            self._place = Place.TEXT

    def _tail(self) -> Iterable[Event]:
        found = self._match(self._format.tail)
        if found.end >= 0:
            self._take(found.end)
            self._place = Place.AFTER_CALL
            yield CallEnds(self._calls - 1)
        elif found.end != MORE:
            self._place = Place.TEXT

    def _after_call(self) -> Iterable[Event]:
        """Parses another call, the end of the calls, or text."""
        following = self._match(self._next, 0, self._tools) if self._next is not None else None
        if following is not None and following.end >= 0:
            yield from self._call(following)
            return
        closing = self._match(self._format.closing)
        waits = following is not None and following.end == MORE
        if not waits and closing.end != MORE:
            self._take(max(closing.end, 0))
            self._place, self._between_calls, self._is_line_start = Place.TEXT, BLANKS, True


def _joined(events: Iterable[Event]) -> Iterable[Event]:
    """Merges adjacent events of the same kind, and drops empty pieces."""
    last: Event | None = None
    for event in events:
        if isinstance(event, (Text, Thought, ArgumentsPiece)) and not event.text:
            continue
        if last is not None and type(event) is type(last) and not isinstance(event, (CallBegins, CallEnds)):
            if isinstance(event, ArgumentsPiece):
                last = ArgumentsPiece(last.index, last.text + event.text)
            else:
                last = type(event)(last.text + event.text)
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last
