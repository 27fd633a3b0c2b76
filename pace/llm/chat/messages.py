"""Parses messages of clients, and restructures them for templates that need another form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pace.llm.chat.tools import ToolCall
from pace.llm.processors.prompts import DETAILS, NOUNS, MediaPart
from pace.naming import shown

Message = Mapping[str, Any]
_MEDIA_ROLES = ("user", "tool")
"""Roles of messages that may have images and sound."""


@dataclass(frozen=True)
class Said:
    """A message of a client, or a part of one that becomes a separate turn."""

    place: str
    """Name of the client's message, such as `messages[3]`."""
    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    others: Mapping[str, Any] | None = None
    """Other fields of the message: `name`, `tool_call_id`, reasoning."""
    is_made: bool = False
    """True if pace made this turn from a message with another role."""
    media: tuple[tuple[int, MediaPart], ...] = ()
    """Images and sound, each with the position in `text` where it stands, in order."""

    @property
    def call_id(self) -> Any:
        """The id of the call whose result this is."""
        return (self.others or {}).get("tool_call_id")

    @property
    def pieces(self) -> list[str | MediaPart]:
        """The text between the media, and the media, in order; no text is empty."""
        ends = [at for at, _ in self.media] + [len(self.text)]
        texts = [self.text[begin:end] for begin, end in zip([0, *ends], ends)]
        found: list[str | MediaPart] = [texts[0]]
        for (_, part), text in zip(self.media, texts[1:]):
            found += [part, text]
        return [piece for piece in found if piece]

    def of_pieces(self, pieces: Iterable[str | MediaPart]) -> Said:
        """Returns the same message with other texts and media."""
        text, media = "", []
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            else:
                media.append((len(text), piece))
        return replace(self, text=text, media=tuple(media))


def read_messages(messages: Any) -> list[Said]:
    """Parses messages. Media in results of tools move to the user's turn after them, since few templates show them in
    a result. A result without a name gets that of its call, which some templates show.

    Raises TypeError if they are not a list of dicts. Raises ValueError for an empty list, a message without a role, and
    content that is neither text nor media. The same for media that are neither the user's nor a tool's. Also for a call
    without a name, or with arguments that are not a JSON object."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"messages must be a list of dicts with role and content; got {messages!r:.60}")
    if not messages:
        raise ValueError("messages must hold one message at least")
    turns = (_read(message, f"messages[{index}]") for index, message in enumerate(messages))
    return list(_media_to_users(_with_names(turns)))


def _read(message: Any, place: str) -> Said:
    if not isinstance(message, Mapping):
        raise TypeError(f"{place} must be a dict with role and content; got {message!r:.60}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f'{place} must have a role, such as "user"; got {message!r:.60}')
    pieces = _pieces(message.get("content"), f"{place}.content", message["role"] in _MEDIA_ROLES)
    calls = _calls(message.get("tool_calls") or (), f"{place}.tool_calls")
    others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    return Said(place, message["role"], calls=calls, others=others).of_pieces(pieces)


def _pieces(content: Any, place: str, takes_media: bool) -> list[str | MediaPart]:
    """Reads the content of a message."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{place} must be text, or a list of parts; got {type(content).__name__}")
    pieces = [_piece(part, f"{place}[{index}]") for index, part in enumerate(content)]
    for piece in pieces:
        if isinstance(piece, MediaPart) and not takes_media:
            raise ValueError(f"{piece.where}: only messages of the user and of tools may have images and sound")
    return pieces


def _piece(part: Any, place: str) -> str | MediaPart:
    """Reads a part: text, or `{"type": "image", "image": source, "detail": "auto"}`, or the same of audio."""
    if isinstance(part, MediaPart):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in tuple(NOUNS):
        if part.get(kind) is None:
            raise ValueError(f"{place} is of type {kind} and must have its source as {kind!r}")
        if (detail := part.get("detail", "auto")) not in DETAILS:
            raise ValueError(f"{place}.detail must be one of {', '.join(DETAILS)}; got {shown(detail)}")
        return MediaPart(kind, part[kind], detail, place)
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f"{place} must be a part of type text, image or audio; got {shown(kind)}")
    return text


def _with_names(turns: Iterable[Said]) -> Iterator[Said]:
    """Adds the name of the called tool to results without a name. Results without an id are matched by order."""
    calls: list[ToolCall] = []
    for turn in turns:
        calls = [*turn.calls] or calls
        if turn.role == "tool" and not turn.others.get("name"):
            call = next((call for call in calls if turn.call_id in (None, "", call.id)), None)
            if call is not None:
                calls.remove(call)
                turn = replace(turn, others={**turn.others, "name": call.name})
        yield turn


def _media_to_users(turns: Iterable[Said]) -> Iterator[Said]:
    """Moves media of results of tools to the beginning of the user's next turn, or to a turn of their own."""
    held: list[MediaPart] = []
    for turn in turns:
        if turn.role == "tool":
            held += [part for _, part in turn.media]
            turn = replace(turn, media=())
        elif held:
            if turn.role != "user":
                yield _shows(held)
            else:
                turn = turn.of_pieces([*held, *turn.pieces])
            held = []
        yield turn
    if held:
        yield _shows(held)


def _shows(media: list[MediaPart]) -> Said:
    """Returns a turn of the user with the media of results."""
    return Said(media[0].where.partition(".")[0], "user", is_made=True).of_pieces(media)


def _calls(items: Any, place: str) -> tuple[ToolCall, ...]:
    """Parses the calls of an assistant's message."""
    if not isinstance(items, Sequence):
        raise ValueError(f"{place} must be a list of calls")
    calls = []
    for index, item in enumerate(items):
        where = f"{place}[{index}].function"
        function = item.get("function", item) if isinstance(item, Mapping) else {}
        name, arguments = function.get("name"), function.get("arguments", "{}")
        if not isinstance(name, str):
            raise ValueError(f"{where}.name must be a string")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        try:
            values = json.loads(arguments or "{}")
        except (TypeError, ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ValueError(f"{where}.arguments must be a JSON object, as text")
        calls.append(ToolCall(str(item.get("id", "")), name, arguments or "{}"))
    return tuple(calls)


def text_apart(turns: Iterable[Said]) -> Iterable[Said]:
    """Moves text next to calls into a turn before them."""
    for turn in turns:
        if turn.calls and turn.text:
            yield replace(turn, calls=(), others=None)
            turn = replace(turn, text="")
        yield turn


def calls_apart(turns: Sequence[Said]) -> Iterable[Said]:
    """Makes each call a separate turn, followed by its results. Results without a known call id are matched by
    order."""
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        if len(turn.calls) < 2:
            yield turn
            continue
        end = at
        while end < len(turns) and turns[end].role == "tool":
            end += 1
        results, at = list(turns[at:end]), end
        known = {call.id for call in turn.calls}
        for number, call in enumerate(turn.calls):
            yield replace(turn, calls=(call,)) if not number else replace(turn, text="", calls=(call,), others=None)
            own = [result for result in results if result.call_id == call.id and call.id]
            own = own or [result for result in results if not result.call_id or result.call_id not in known][:1]
            yield from own
            results = [result for result in results if result not in own]
        yield from results


def results_as_users(turns: Iterable[Said]) -> Iterator[Said]:
    """Turns results of tools into turns of the user."""
    return _joined(_as_user(turn) if turn.role == "tool" else turn for turn in turns)


def instruction_forms(turns: list[Said]) -> Iterator[list[Said]]:
    """Yields a conversation unchanged, then in other forms for templates that need them. The first has developer turns
    as system turns, the next a single system turn at the beginning. The last has no system turn: all instructions
    are in turns of the user."""
    systems = [replace(turn, role="system") if turn.role == "developer" else turn for turn in turns]
    known: list[list[Said]] = []
    for form in (turns, systems, _systems_as_users(systems, True), _systems_as_users(systems, False)):
        if form not in known:
            known.append(form)
            yield form


def num_instructions(turns: Iterable[Said]) -> int:
    """Number of system and developer turns."""
    return sum(turn.role in ("system", "developer") for turn in turns)


def _systems_as_users(turns: list[Said], keeps_first: bool) -> list[Said]:
    """Turns system turns into turns of the user. With `keeps_first`, those at the beginning become one system turn."""
    first = list(itertools.takewhile(lambda turn: turn.role == "system", turns)) if keeps_first else []
    together = [replace(first[0], text=_text_of(first, "\n\n"))] if first else []
    return [*together, *_joined(_as_user(turn) if turn.role == "system" else turn for turn in turns[len(first) :])]


def _as_user(turn: Said) -> Said:
    return replace(turn, role="user", others=None, is_made=True)


def _joined(turns: Iterable[Said]) -> Iterator[Said]:
    """Merges turns of the user that pace made with their neighbours, because many templates require alternating
    roles."""
    last: Said | None = None
    for turn in turns:
        if last is not None and last.role == turn.role == "user" and (last.is_made or turn.is_made):
            between = ["\n"] if last.text and turn.text else []
            last = replace(turn, place=last.place).of_pieces([*last.pieces, *between, *turn.pieces])
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last


def _text_of(turns: Iterable[Said], separator: str) -> str:
    return separator.join(turn.text for turn in turns if turn.text)
