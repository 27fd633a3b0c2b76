"""Literals: fixed text of a format with holes. They are written, matched incrementally, and converted to terminals of a
grammar.

Whitespace in a literal is optional, unless it separates two words; holes and the ends of the literal count as words.
Models omit or add newlines, and templates of one format often differ only in whitespace. For optional whitespace a
grammar allows the literal's own or none; a match allows any. A hole is `$NAME`, `$INDEX`, `$ID` with
nine characters, or `$ID10` with ten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

_HOLE = re.compile(r"\$(NAME|ID10|ID|INDEX)")
ANY_BLANK = r"[ \t\r\n]*"
"""Optional whitespace in a match, as a regular expression."""
_SPACE = re.compile(r"[ \t\r\n]+")
_WORD = re.compile(r"\w")
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_HOLE_TEXT = {**dict.fromkeys(("ID", "ID10"), re.compile(r"[A-Za-z0-9]*")), "INDEX": re.compile(r"[0-9]*")}
_HOLE_TERMINAL = {"ID": "[A-Za-z0-9]{9}", "ID10": "[A-Za-z0-9]{10}", "INDEX": "[0-9]{1,3}"}
_HOLE_KEY = {"ID10": "ID"}
"""Hole -> the key of its contents, if that is not its name."""

MORE = -1
"""The text may become a match with more characters."""
NO = -2


@dataclass(frozen=True)
class Part:
    """Fixed text without whitespace, whitespace, or a hole."""

    kind: str
    text: str
    optional: bool = False


@dataclass
class Match:
    """The end of a literal in a text, or MORE or NO; and the contents of its holes."""

    end: int
    holes: dict[str, str]


@lru_cache(maxsize=1024)
def parts(literal: str) -> tuple[Part, ...]:
    """Splits a literal into parts."""
    found: list[Part] = []
    for index, piece in enumerate(_HOLE.split(literal)):
        if index % 2:
            found.append(Part(piece, ""))
            continue
        start = 0
        for space in _SPACE.finditer(piece):
            found += [Part("text", piece[start : space.start()])] if space.start() > start else []
            found.append(Part("space", space.group()))
            start = space.end()
        found += [Part("text", piece[start:])] if start < len(piece) else []
    return tuple(_optional_spaces(found))


def _optional_spaces(found: Sequence[Part]) -> Iterable[Part]:
    for index, part in enumerate(found):
        if part.kind != "space":
            yield part
            continue
        before = found[index - 1] if index else None
        after = found[index + 1] if index + 1 < len(found) else None
        yield Part("space", part.text, not (_wordlike(before, -1) and _wordlike(after, 0)))


def _wordlike(part: Part | None, at: int) -> bool:
    return part is None or part.kind != "text" or bool(_WORD.match(part.text[at]))


def match(literal: str, text: str, start: int, names: Collection[str] = ()) -> Match:
    """Matches a literal from `start` on. `$NAME` is one of `names`, as a whole word. Optional whitespace at the end
    matches what has arrived, without waiting for more."""
    return _match(parts(literal), text, start, names)


def _match(todo: tuple[Part, ...], text: str, at: int, names: Collection[str]) -> Match:
    for index, part in enumerate(todo):
        if part.kind == "text" or (part.kind == "space" and not part.optional):
            rest = text[at : at + len(part.text)]
            if rest != part.text:
                return Match(MORE if part.text.startswith(rest) else NO, {})
            at += len(rest)
        elif part.optional:
            at = blank(text, at)
        elif part.kind == "NAME":
            return _match_name(todo[index + 1 :], text, at, names)
        else:
            end = _HOLE_TEXT[part.kind].match(text, at).end()
            if end == len(text):
                return Match(MORE, {})
            if end == at:
                return Match(NO, {})
            rest = _match(todo[index + 1 :], text, end, names)
            return Match(rest.end, {_HOLE_KEY.get(part.kind, part.kind): text[at:end], **rest.holes})
    return Match(at, {})


def _match_name(todo: tuple[Part, ...], text: str, at: int, names: Collection[str]) -> Match:
    word = _NAME.match(text, at).group()
    end = at + len(word)
    if end == len(text):
        return Match(MORE if any(name.startswith(word) for name in names) else NO, {})
    if word not in names:
        return Match(NO, {})
    found = _match(todo, text, end, names)
    return Match(found.end, {"NAME": word, **found.holes})


def blank(text: str, start: int = 0) -> int:
    """Position after the whitespace at `start`."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def write(literal: str, **holes: str) -> str:
    """Fills the holes of a literal."""
    return _HOLE.sub(lambda hole: holes[_HOLE_KEY.get(hole.group(1), hole.group(1))], literal)


def terminals(literal: str, special: Mapping[str, int], name: str = "") -> str:
    """Converts a literal to a Lark expression, with names of special tokens as tokens; "" for an empty literal."""
    pieces: list[str] = []
    run = ""
    for part in parts(literal):
        if part.kind == "text":
            for piece in _at_specials(part.text, special):
                if piece in special:
                    pieces += [_terminal(run), f"<[{special[piece]}]>"]
                    run = ""
                else:
                    run += pattern(piece)
        elif part.kind == "space":
            run += f"({pattern(part.text)})?" if part.optional else pattern(part.text)
        else:
            run += pattern(name) if part.kind == "NAME" else _HOLE_TERMINAL[part.kind]
    return " ".join(filter(None, [*pieces, _terminal(run)]))


def _terminal(regex: str) -> str:
    return f"/{regex}/" if regex else ""


def _at_specials(text: str, special: Mapping[str, int]) -> list[str]:
    names = [name for name in special if name and name in text]
    if not names:
        return [text]
    names.sort(key=len, reverse=True)
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, names))})", text) if piece]


def pattern(text: str) -> str:
    """Escapes a text for a Lark regular expression between slashes."""
    return "".join(_character(character) for character in text)


def _character(character: str) -> str:
    if character in "\n\r\t":
        return json.dumps(character)[1:-1]
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return "\\" + character if character in r"\.+*?()|[]{}^$/#&-~" else character
