"""What a grammar may cost before it is looked at: somebody else may have written it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarLimits:
    """Bounds of one grammar. What llguidance bounds itself, such as the work for one mask, is not among them."""

    max_bytes: int = 256 * 1024
    """Most bytes of its source."""
    max_depth: int = 64
    """Most brackets within brackets, or schemas within schemas."""
    max_schemas: int = 4096
    """Schemas that one JSON schema is made of: compiling takes a fraction of a millisecond for each."""
    max_choices: int = 16384
    max_optional: int = 1000
    """Properties that may come, and need not, at one place of a text: the work for one token grows with their square,
    some 0.1 s for so many."""

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
    """How deep round brackets and braces stand in each other. Those after a backslash, in double quotes, and in a class
    of characters do not count."""
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
    """Where a quoted string or a class ends that begins at `start`; the end of the text where it does not."""
    index = start + 1
    while index < len(text) and text[index] != closer:
        index += 2 if text[index] == "\\" else 1
    return index
