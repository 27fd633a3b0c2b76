"""Converts one literal of Python or JSON to JSON text, incrementally."""

from __future__ import annotations

import json
import re

from pace.llm.chat.arguments.base import Reading, State

_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+([eE]\d*)?|[eE]\d*")
_ESCAPES = {"'": "'", '"': '\\"', "\\": "\\\\", "n": "\\n", "r": "\\r", "t": "\\t", "b": "\\b", "f": "\\f", "/": "/",
            "0": "\\u0000", "a": "\\u0007", "v": "\\u000b", "\n": ""}  # fmt: skip
_HEX_DIGITS = {"u": 4, "x": 2}


class LiteralReader:
    """Reads a literal up to a comma or bracket that does not belong to it, which it does not consume."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quote = ""
        self._begun = False

    def read(self, text: str) -> Reading:
        pieces: list[str] = []
        at = 0
        while at < len(text):
            piece, used, state = self._inside(text, at) if self._quote else self._outside(text, at)
            pieces.append(piece)
            at += used
            if state is not State.MORE:
                return Reading("".join(pieces), at, state)
            if not used:
                break
            self._begun = self._begun or not piece.isspace()
        return Reading("".join(pieces), at, State.MORE)

    def _outside(self, text: str, at: int) -> tuple[str, int, State]:
        """Reads one token outside of strings. Consumes nothing if its end has not arrived."""
        character = text[at]
        word = _WORD.match(text, at)
        if word:
            if word.end() == len(text):
                return "", 0, State.MORE
            found = _CONSTANTS.get(word.group(), word.group() if _NUMBER.fullmatch(word.group()) else None)
            return (found, len(word.group()), State.MORE) if found else ("", 0, State.BROKEN)
        if character in "'\"":
            self._quote = character
            return '"', 1, State.MORE
        if character in _CLOSING:
            self._open.append(_CLOSING[character])
            return "{" if character == "{" else "[", 1, State.MORE
        if not self._open and character in ",)":
            return "", 0, State.DONE if self._begun else State.BROKEN
        if character in ")]}":
            if not self._open or self._open.pop() != character:
                return "", 0, State.BROKEN
            return "}" if character == "}" else "]", 1, State.MORE
        if character.isspace() or character in "+-." or (self._open and character in ",:"):
            return character, 1, State.MORE
        return "", 0, State.BROKEN

    def _inside(self, text: str, at: int) -> tuple[str, int, State]:
        """Reads one character or escape of a string."""
        character = text[at]
        if character == self._quote:
            self._quote = ""
            return '"', 1, State.MORE
        if character != "\\":
            return json.dumps(character, ensure_ascii=False)[1:-1], 1, State.MORE
        if at + 1 == len(text):
            return "", 0, State.MORE
        kind = text[at + 1]
        digits = text[at + 2 : at + 2 + _HEX_DIGITS.get(kind, 0)]
        if kind not in _HEX_DIGITS:
            return _ESCAPES.get(kind, "\\\\" + kind), 2, State.MORE
        if len(digits) < _HEX_DIGITS[kind]:
            return "", 0, State.MORE
        if not re.fullmatch("[0-9a-fA-F]+", digits):
            return "\\\\" + kind, 2, State.MORE
        return f"\\u{digits:0>4}", 2 + len(digits), State.MORE
