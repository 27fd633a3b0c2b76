"""Regular expressions of module paths, matched in bounded time: `Pattern`.

`re` may take forever for expressions such as `(a|a)*b`. Here, each part of an expression is matched once from each
place in a path. The result is the set of places where a match may end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pace.naming import shown

LITERAL = re.compile(r"[\w.\-]+")
"""Expressions without anything to choose from, which `re` matches in the order of a path's length."""
MAX_REPEATS = 1000
"""Largest number in braces."""
MAX_STEPS = 2_000_000
"""Places that are looked at for one path; about a second."""
CLASSES = {"d": str.isdecimal, "w": lambda char: char.isalnum() or char == "_", "s": str.isspace}
"""Letter after a backslash -> whether a character is one of these; the capital letter is the opposite."""

Ends = frozenset[int]
Fits = Callable[[str], bool]


class Pattern:
    """A key of PEFT's `rank_pattern` or `alpha_pattern`: an expression that matches the end of a module's path, after a
    dot or all of it."""

    def __init__(self, key: str):
        """Raises ValueError if `key` is not a regular expression. Raises NotImplementedError for references, flags and
        look-around."""
        self.key = key
        try:
            re.compile(key)
            self._literal = re.compile(rf"(.*\.)?({key})$") if LITERAL.fullmatch(key) else None
            self._parts = None if self._literal else _Parser(key).read()
        except (re.error, RecursionError, OverflowError):
            raise ValueError(f"{shown(key)} is not a regular expression") from None

    def matches(self, path: str) -> bool:
        """True if the end of a path matches. Raises ValueError if that takes too long to find out."""
        if self._literal is not None:
            return self._literal.match(path) is not None
        assert self._parts is not None
        starts = [0, *(index + 1 for index, char in enumerate(path) if char == ".")]
        search = _Search(self.key, path)
        try:
            return any(len(path) in search.ends(self._parts, start) for start in starts)
        except RecursionError:
            raise ValueError(f"the pattern {shown(self.key)} is nested too deeply; simplify it") from None


@dataclass(frozen=True, eq=False)
class One:
    """A character."""

    fits: Fits


@dataclass(frozen=True, eq=False)
class Edge:
    """The beginning of a path, or its end."""

    is_end: bool


@dataclass(frozen=True, eq=False)
class Row:
    """Parts one after the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    part: Part
    least: int
    most: int | None


Part = One | Edge | Row | Choice | Repeat


class _Search:
    """Matches from all places of one path."""

    def __init__(self, key: str, path: str):
        self._key = key
        self._path = path
        self._known: dict[tuple[Part, int], Ends] = {}
        self._steps = 0

    def ends(self, part: Part, start: int) -> Ends:
        """The places where a match of a part from `start` may end."""
        key = part, start
        if key not in self._known:
            self._known[key] = self._find(part, start)
        return self._known[key]

    def _find(self, part: Part, start: int) -> Ends:
        if isinstance(part, One):
            fits = start < len(self._path) and part.fits(self._path[start])
            return frozenset([start + 1] if fits else [])
        if isinstance(part, Edge):
            return frozenset([start] if start == (len(self._path) if part.is_end else 0) else [])
        if isinstance(part, Choice):
            return frozenset().union(*(self.ends(each, start) for each in part.parts))
        if isinstance(part, Row):
            places = frozenset([start])
            for each in part.parts:
                places = self._after(each, places)
            return places
        places = frozenset([start])
        for _ in range(part.least):
            before, places = places, self._after(part.part, places)
            if places == before:
                break  # so it is after any further repetition
        found = places
        count = part.least
        while places and (part.most is None or count < part.most):
            places = self._after(part.part, places) - found
            found |= places
            count += 1
        return found

    def _after(self, part: Part, places: Ends) -> Ends:
        found: set[int] = set()
        for place in places:
            ends = self.ends(part, place)
            self._steps += 1 + len(ends)
            if self._steps > MAX_STEPS:
                raise ValueError(f"the pattern {shown(self._key)} takes too long to match; simplify it")
            found |= ends
        return frozenset(found)


class _Parser:
    """Reads an expression that `re` accepts."""

    def __init__(self, key: str):
        self._key = key
        self._at = 0

    def read(self) -> Part:
        return self._choice()

    def _choice(self) -> Part:
        rows = [self._row()]
        while self._take("|"):
            rows.append(self._row())
        return rows[0] if len(rows) == 1 else Choice(tuple(rows))

    def _row(self) -> Part:
        parts: list[Part] = []
        while self._at < len(self._key) and self._key[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return Row(tuple(parts))

    def _atom(self) -> Part:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise self._refused("(?" + self._key[self._at : self._at + 1])
            inner = self._choice()
            self._next()  # the closing parenthesis
            return inner
        if char in "^$":
            return Edge(char == "$")
        if char == ".":
            return One(lambda given: given != "\n")
        if char == "[":
            return One(self._set())
        return One(self._escaped() if char == "\\" else _is(char))

    def _repeated(self, part: Part) -> Part:
        while True:
            if self._take("*"):
                part = Repeat(part, 0, None)
            elif self._take("+"):
                part = Repeat(part, 1, None)
            elif self._take("?"):
                part = Repeat(part, 0, 1)
            elif found := re.compile(r"\{(\d*)(,?)(\d*)\}").match(self._key, self._at):
                if not (found[1] or found[2]):
                    return part  # braces that are characters
                self._at = found.end()
                least = int(found[1] or 0)
                most = least if not found[2] else int(found[3]) if found[3] else None
                if max(least, most or 0) > MAX_REPEATS:
                    raise self._refused(found[0])
                part = Repeat(part, least, most)
            else:
                return part
            if self._take("+"):
                raise self._refused("a possessive repetition")
            self._take("?")  # the shortest match is one of the matches

    def _set(self) -> Fits:
        """Reads what follows an opening bracket."""
        is_negated, options, is_first = self._take("^"), [], True
        while is_first or self._key[self._at] != "]":
            is_first, char = False, self._next()
            if char == "\\":
                name = self._key[self._at]
                fits = self._escaped()
                if name.lower() in CLASSES:
                    options.append(fits)
                    continue
                char = _character(name)
            if self._key[self._at] == "-" and self._key[self._at + 1] != "]":
                self._at += 1
                last = self._next()
                if last == "\\":
                    last = _character(self._next())
                options.append(_between(char, last))
            else:
                options.append(_is(char))
        self._at += 1
        return lambda given: any(fits(given) for fits in options) != is_negated

    def _escaped(self) -> Fits:
        """Reads what follows a backslash."""
        char = self._next()
        if char.lower() in CLASSES:
            fits = CLASSES[char.lower()]
            return fits if char.islower() else lambda given: not fits(given)
        if char.isalnum() and char not in ESCAPES:
            raise self._refused(f"\\{char}")
        return _is(_character(char))

    def _next(self) -> str:
        self._at += 1
        return self._key[self._at - 1]

    def _take(self, char: str) -> bool:
        """Goes on if the next character is this one."""
        if self._key[self._at : self._at + 1] != char:
            return False
        self._at += 1
        return True

    def _refused(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"the pattern {shown(self._key)} has {what}, which is not implemented")


ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


def _character(char: str) -> str:
    """The character that a backslash and `char` stand for."""
    return ESCAPES.get(char, char)


def _between(first: str, last: str) -> Fits:
    return lambda given: first <= given <= last


def _is(char: str) -> Fits:
    return lambda given: given == char
