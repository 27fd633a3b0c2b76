"""The contracts of arguments, and rules of a grammar while it is made."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Rules of a grammar in Lark, by name. `special` are the ids of the tokenizer's special tokens."""

    special: Mapping[str, int]
    lines: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, expression: str, lazy: bool = False) -> str:
        """Adds `name: expression` and returns the name. A lazy rule is one terminal, and ends as soon as it can."""
        self.lines[f"{name}[lazy]" if lazy else name] = expression or '""'
        return name

    def until(self, name: str, marker: str, before: str = ANYTHING) -> str:
        """Text up to and with the first `marker`, which has no whitespace at its ends.

        A marker of special tokens may be spelled in plain characters, too: a reader of text sees no difference. One of
        several that is all that may come, but for `before`, may not: once its beginning is spelled, llguidance would
        take the rest of it for tokens.
        """
        tokens = terminals(marker, self.special)
        free = f"/{before}/ " if before else ""
        if before != ANYTHING and tokens.count("<[") > 1:
            return self.add(name, free + tokens)
        spelled = self.add(f"{name}_text", f"/{before}{pattern(marker)}/", lazy=True)
        if not tokens.startswith("<["):
            return spelled
        return self.add(name, f"{free}{tokens} | {spelled}")

    def text(self) -> str:
        """The grammar."""
        return "".join(f"{name}: {expression}\n" for name, expression in {"%llguidance {}": None, **self.lines}.items()
                       if expression is not None)  # fmt: skip


class State(Enum):
    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


@dataclass(frozen=True)
class Reading:
    """What a reader made of a text: a piece of JSON text, how many characters it took, and how it goes on."""

    piece: str
    used: int
    state: State


class Reader(Protocol):
    """Reads the arguments of one call, as they come."""

    def read(self, text: str) -> Reading:
        """Takes what it can of `text`, which begins with what it did not take before.

        DONE ends the arguments, BROKEN says that these are none; what was not taken belongs to others.
        """


class Arguments(Protocol):
    """A way to write the arguments of a call."""

    def write(self, values: Mapping[str, Any], tool: Tool) -> str:
        """The text of these values."""

    def grammar(self, tool: Tool, rules: Rules, name: str) -> str:
        """An expression in Lark that matches the arguments of `tool`; its rules have names that begin with `name`."""

    def reader(self, tool: Tool) -> Reader: ...
