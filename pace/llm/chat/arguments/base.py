"""Protocols for the arguments of a call, and a builder of grammar rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pace.llm.chat.literals import pattern, terminals
from pace.llm.chat.tools import Tool

ANYTHING = r"(.|\n)*"
ANY_TEXT = f"/{ANYTHING}/"
"""Text without special tokens."""


@dataclass
class Rules:
    """Rules of a Lark grammar, by name. `special` maps the tokenizer's special tokens to their ids."""

    special: Mapping[str, int]
    lines: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, expression: str, lazy: bool = False) -> str:
        """Adds `name: expression` and returns the name. A lazy rule is one terminal, and ends as soon as possible."""
        self.lines[f"{name}[lazy]" if lazy else name] = expression or '""'
        return name

    def until(self, name: str, marker: str, before: str = ANYTHING) -> str:
        """Adds a rule for text that ends with the first `marker`, which has no whitespace at its ends.

        A marker of special tokens may also be spelled in plain characters: a parser of text sees no difference. The
        exception is a marker of several special tokens after anything but free text (`before`). Once its beginning is
        spelled, llguidance would read the rest as tokens.
        """
        tokens = terminals(marker, self.special)
        free = f"/{before}/ " if before else ""
        if before != ANYTHING and tokens.count("<[") > 1:
            return self.add(name, free + tokens)
        spelled = self.add(f"{name}_text", f"/{before}{pattern(marker)}/", lazy=True)
        if not tokens.startswith("<["):
            return spelled
        return self.add(name, f"{free}{tokens} | {spelled}")

    def some(self, name: str, required: Sequence[bool], separator: str) -> str:
        """Adds rules for the arguments `{name}_0`, `{name}_1`, ..., in order and separated; at least the required ones.
        Returns the expression."""
        if not required:
            return '""'
        some = self._some(name, required, 0, len(required), separator)
        return some if any(required) else f"{some}?"

    def _some(self, name: str, required: Sequence[bool], start: int, stop: int, separator: str) -> str:
        """Adds a rule for one or more of the arguments from `start` to `stop`, and returns its name.

        It is built from two halves, because a chain of rules overflows llguidance's stack.
        """
        if stop - start == 1:
            return f"{name}_{start}"
        middle = (start + stop) // 2
        left, right = (self._some(name, required, *part, separator) for part in ((start, middle), (middle, stop)))
        both = f"{left} {separator} {right}"
        both = both if any(required[middle:stop]) else f"{left} ({separator} {right})?"
        return self.add(f"{name}_{start}_{stop}", both if any(required[start:middle]) else f"{both} | {right}")

    def text(self) -> str:
        """The text of the grammar."""
        return "".join(f"{name}: {expression}\n" for name, expression in {"%llguidance {}": None, **self.lines}.items()
                       if expression is not None)  # fmt: skip


class State(Enum):
    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


@dataclass(frozen=True)
class Reading:
    """Result of a read: a piece of JSON text, the number of characters consumed, and the state of the reader."""

    piece: str
    used: int
    state: State


class Reader(Protocol):
    """Incremental parser of the arguments of one call."""

    def read(self, text: str) -> Reading:
        """Consumes as much of `text` as possible. `text` begins with the characters that the last call did not consume.

        The state DONE ends the arguments, and BROKEN means that they are invalid; the reader does not own the remaining
        text.
        """


class Arguments(Protocol):
    """A notation for the arguments of a call."""

    quote: str
    """A special token around strings; "" if there is none."""

    def write(self, values: Mapping[str, Any], tool: Tool) -> str:
        """Returns the text of these values."""

    def grammar(self, tool: Tool, rules: Rules, name: str) -> str:
        """Returns a Lark expression for the arguments of `tool`. The names of its rules begin with `name`."""

    def reader(self, tool: Tool) -> Reader: ...
