"""Limits on the cost of a grammar, checked before parsing, because a grammar may be untrusted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of one grammar. Limits that llguidance enforces itself, such as the work for one mask, are not
    included."""

    max_bytes: int = 256 * 1024
    """Maximum bytes of its source."""
    max_depth: int = 64
    """Maximum nesting of brackets or schemas."""
    max_schemas: int = 4096
    """Maximum schemas within one JSON schema: each takes a fraction of a millisecond to compile."""
    max_choices: int = 16384
    max_optional: int = 1000
    """Maximum optional properties in one place: the work for one token grows with their square, to about 0.1 s at this
    number."""

    def check_text(self, text: str, what: str) -> None:
        """Raises ValueError for a text that is too long or nested too deeply."""
        if (num_bytes := len(text.encode("utf-8", "surrogatepass"))) > self.max_bytes:
            raise ValueError(f"the {what} has {num_bytes} bytes; at most {self.max_bytes} are taken")
        if (depth := bracket_depth(text)) > self.max_depth:
            raise ValueError(
                f"the {what} has brackets within brackets {depth} deep; at most {self.max_depth} are taken"
            )


DEFAULT_LIMITS = GrammarLimits()


def bracket_depth(text: str) -> int:
    """Returns the nesting depth of round brackets and braces. Brackets after a backslash, in double quotes, or in a
    character class do not count."""
    depth = deepest = index = 0
    while index < len(text):
        letter = text[index]
        if letter == "\\":
            index += 1
        elif letter in '"[':
            index = _end_of(text, index, '"' if letter == '"' else "]")
        elif letter in "({":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")}":
            depth = max(0, depth - 1)
        index += 1
    return deepest


def _end_of(text: str, start: int, closer: str) -> int:
    """Index of the end of a quoted string or class that begins at `start`; at least `len(text)` if it has no end."""
    index = start + 1
    while index < len(text) and text[index] != closer:
        index += 2 if text[index] == "\\" else 1
    return index
