"""Messages as clients write them, read; and how they are told apart for templates that take them in another way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pace.llm.chat.tools import ToolCall
from pace.naming import shown

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """One message: a client's own, or a part of one that stands as a turn of its own."""

    place: str
    """The client's message, as `messages[3]`."""
    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    others: Mapping[str, Any] | None = None
    """What else a message says: `name`, `tool_call_id`, thoughts."""
    is_made: bool = False
    """Whether pace made this turn of a message with another role."""

    @property
    def call_id(self) -> Any:
        """The call whose result this is."""
        return (self.others or {}).get("tool_call_id")


def read_messages(messages: Any) -> list[Said]:
    """Raises TypeError for what is no list of dicts; ValueError for an empty list, for a message without a role, content that is no text,
    and calls without a name or with arguments that are no JSON object."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"messages must be a list of dicts with role and content; got {messages!r:.60}")
    if not messages:
        raise ValueError("messages must hold one message at least")
    return [_read(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read(message: Any, place: str) -> Said:
    if not isinstance(message, Mapping):
        raise TypeError(f"{place} must be a dict with role and content; got {message!r:.60}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f'{place} must have a role, such as "user"; got {message!r:.60}')
    text = _text(message.get("content"), f"{place}.content")
    calls = _calls(message.get("tool_calls") or (), f"{place}.tool_calls")
    others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    return Said(place, message["role"], text, calls, others)


def _text(content: Any, place: str) -> str:
    """A message's content as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError(f"{place} must be text, or parts of type text; got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(
                f"{place}[{index}] must be a part of type text, as models read text only; got {shown(kind)}"
            )
        texts.append(text)
    return "".join(texts)


def _calls(items: Any, place: str) -> tuple[ToolCall, ...]:
    """The calls of a message of the assistant."""
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
    """The text beside calls as a turn before them."""
    for turn in turns:
        if turn.calls and turn.text:
            yield replace(turn, calls=(), others=None)
            turn = replace(turn, text="")
        yield turn


def calls_apart(turns: Sequence[Said]) -> Iterable[Said]:
    """Each call as a turn of its own, and its results behind it. Results that name no call follow their order."""
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
    """Results of tools as turns of the user."""
    return _joined(_as_user(turn) if turn.role == "tool" else turn for turn in turns)


def instruction_forms(turns: list[Said]) -> Iterator[list[Said]]:
    """A conversation as it is, then in the forms that other templates take: a developer's instructions as those of the
    system; one system turn, at the beginning; none, with all instructions in turns of the user."""
    systems = [replace(turn, role="system") if turn.role == "developer" else turn for turn in turns]
    known: list[list[Said]] = []
    for form in (turns, systems, _systems_as_users(systems, True), _systems_as_users(systems, False)):
        if form not in known:
            known.append(form)
            yield form


def num_instructions(turns: Iterable[Said]) -> int:
    """Turns of the system and of developers."""
    return sum(turn.role in ("system", "developer") for turn in turns)


def _systems_as_users(turns: list[Said], keeps_first: bool) -> list[Said]:
    """System turns as turns of the user. With `keeps_first`, those that begin the conversation are one system turn."""
    first = list(itertools.takewhile(lambda turn: turn.role == "system", turns)) if keeps_first else []
    together = [replace(first[0], text=_paragraphs(first))] if first else []
    return [*together, *_joined(_as_user(turn) if turn.role == "system" else turn for turn in turns[len(first) :])]


def _as_user(turn: Said) -> Said:
    return replace(turn, role="user", others=None, is_made=True)


def _joined(turns: Iterable[Said]) -> Iterator[Said]:
    """Turns of the user that pace made are one with their neighbours: many templates want roles to alternate."""
    last: Said | None = None
    for turn in turns:
        if last is not None and last.role == turn.role == "user" and (last.is_made or turn.is_made):
            last = replace(turn, place=last.place, text=_paragraphs([last, turn]))
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last


def _paragraphs(turns: Iterable[Said]) -> str:
    return "\n\n".join(turn.text for turn in turns if turn.text)
