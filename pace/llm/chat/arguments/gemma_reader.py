"""Converts arguments in Gemma 4's notation to JSON text, incrementally."""

from __future__ import annotations

import json
import re

from pace.llm.chat.arguments.base import Reading, State
from pace.llm.chat.arguments.tagged_arguments import held_back

QUOTE = '<|"|>'
"""The mark before and after a string."""
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_JSON_PIECE = re.compile(r'(?:[^"\\]|\\.)*')
_WORD = re.compile(r'[^\s,:{}\[\]<"]+')
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


class MembersReader:
    """Converts `key:value,...` to a JSON object, up to the closing brace of the call, which it does not consume."""

    def __init__(self) -> None:
        self._open = ["}"]
        """Brackets that close what is open; the first is the call's."""
        self._quote = ""
        """The quote that ends the current string; "" outside of strings."""
        self._expects = "member"
        """ "member" or "value" at the start of one, "first member" or "first value" after a bracket, else "end"."""
        self._begun = False

    def read(self, text: str) -> Reading:
        pieces = [] if self._begun else ["{"]
        at = 0
        if not self._begun:
            self._begun, self._expects = True, "first member"
        while at < len(text):
            piece, used, state = self._inside(text, at) if self._quote else self._outside(text, at)
            pieces.append(piece)
            at += used
            if state is not State.MORE:
                return Reading("".join(pieces), at, state)
            if not used:
                break
        return Reading("".join(pieces), at, State.MORE)

    def _outside(self, text: str, at: int) -> tuple[str, int, State]:
        """Reads one token outside of strings. Consumes nothing if its end has not arrived."""
        character = text[at]
        if character.isspace():
            return "", 1, State.MORE
        if character == self._open[-1] and self._expects in ("end", "first member", "first value"):
            self._open.pop()
            self._expects = "end"
            return ("}", 0, State.DONE) if not self._open else (character, 1, State.MORE)
        if self._expects == "end":
            if character != ",":
                return "", 0, State.BROKEN
            self._expects = "member" if self._open[-1] == "}" else "value"
            return ", ", 1, State.MORE
        return (self._key if "member" in self._expects else self._value)(text, at)

    def _key(self, text: str, at: int) -> tuple[str, int, State]:
        """Reads a whole key and its colon."""
        if len(text) - at < len(QUOTE) and QUOTE.startswith(text[at:]):
            return "", 0, State.MORE
        if text.startswith(QUOTE, at):
            start = at + len(QUOTE)
            end = text.find(QUOTE, start)
            name, after = text[start:end], end + len(QUOTE) if end >= 0 else -1
        elif text[at] == '"':
            found = _JSON_STRING.match(text, at)
            name, after = _loaded(found), found.end() if found else -1
        else:
            end = text.find(":", at)
            name, after = text[at:end].rstrip(), end
            if {"{", "}", "\n"} & set(text[at:] if end < 0 else name):
                return "", 0, State.BROKEN
        rest = text[after:].lstrip() if after >= 0 else ""
        if name is None or (rest and rest[0] != ":"):
            return "", 0, State.BROKEN
        if not rest:
            return "", 0, State.MORE
        self._expects = "value"
        return f"{json.dumps(name, ensure_ascii=False)}: ", text.index(":", after) + 1 - at, State.MORE

    def _value(self, text: str, at: int) -> tuple[str, int, State]:
        """Reads a constant, or the beginning of any other value."""
        character = text[at]
        if text.startswith(QUOTE, at):
            self._quote = QUOTE
            return '"', len(QUOTE), State.MORE
        if character == '"':
            self._quote = '"'
            return '"', 1, State.MORE
        if character in "{[":
            self._open.append("}" if character == "{" else "]")
            self._expects = "first member" if character == "{" else "first value"
            return character, 1, State.MORE
        word = _WORD.match(text, at)
        if word and word.end() == len(text) or QUOTE.startswith(text[at:]):
            return "", 0, State.MORE
        name = word.group() if word else ""
        found = _CONSTANTS.get(name, name if _NUMBER.fullmatch(name) else None)
        if found is None:
            return "", 0, State.BROKEN
        self._expects = "end"
        return found, len(name), State.MORE

    def _inside(self, text: str, at: int) -> tuple[str, int, State]:
        """Reads as much of a string as is certain."""
        if self._quote == '"':
            end = _JSON_PIECE.match(text, at).end()
            piece, is_whole = text[at:end], text[end : end + 1] == '"'
        else:
            end = text.find(QUOTE, at)
            is_whole = end >= 0
            end = end if is_whole else len(text) - held_back(text[at:], QUOTE)
            piece = json.dumps(text[at:end], ensure_ascii=False)[1:-1]
        if not is_whole:
            return piece, end - at, State.MORE
        used = end + len(self._quote) - at
        self._quote, self._expects = "", "end"
        return piece + '"', used, State.MORE


def _loaded(found: re.Match[str] | None) -> str | None:
    """Returns the text of a JSON string; "" before it is complete, and None if it is invalid."""
    if found is None:
        return ""
    try:
        return json.loads(found.group())
    except ValueError:
        return None
