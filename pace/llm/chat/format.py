"""Description of the tool calls of a model family, from which a grammar and a parser are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pace.llm.chat.arguments import Arguments, JsonArguments
from pace.llm.chat.ids import IdRule, call_id
from pace.llm.chat.literals import write
from pace.llm.chat.tools import Tool, ToolCall


@dataclass(frozen=True)
class ToolFormat:
    """Format of calls: `opening call (between call)* closing`.

    All parts are text that contains special tokens by name (`literals.py`). When a grammar is made, these names are
    looked up in the tokenizer.
    """

    name: str
    call: str
    """One call, with the holes `$NAME` and `$ARGS`, and `$ID` or `$INDEX` for an id that the model writes."""
    trigger: str
    """Beginning of `opening + call` after which text counts as a call. It is a special token, or text that an answer
    should not contain."""
    signs: tuple[str, ...] = ()
    """Fragments that identify a chat template of this format; it contains all of them."""
    opening: str = ""
    between: str | None = "\n"
    """Text between calls; None if a turn has at most one call."""
    closing: str = ""
    anywhere: bool = True
    """True if text may come before and after calls. Otherwise a turn is either text or calls, from its first
    character."""
    reply: tuple[str, str] = ("", "")
    """Marks around the text of an answer, if the format has them. If a mark is whitespace, any whitespace there is
    dropped."""
    preamble: tuple[str, str] = ("", "")
    """Marks around text before calls or the answer, if the format has them."""
    arguments: Arguments = field(default_factory=JsonArguments)
    make_id: IdRule = call_id

    @cached_property
    def head(self) -> str:
        """The part of a call before its arguments."""
        return self.call.partition("$ARGS")[0]

    @cached_property
    def tail(self) -> str:
        """The part of a call after its arguments."""
        return self.call.partition("$ARGS")[2]

    @cached_property
    def bare(self) -> tuple[str, str, str] | None:
        """The head and the tail of a call without its outer tags, and the outer closing tag. None unless such a call
        begins with another tag."""
        closing = self.trigger.replace("<", "</", 1)
        head = self.head.removeprefix(self.trigger).lstrip()
        if self.opening or not head.startswith("<") or not self.tail.endswith(closing):
            return None
        return head, self.tail.removesuffix(closing).rstrip(), closing

    @property
    def answers_are_marked(self) -> bool:
        return bool(self.reply[0])

    def write(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], arguments: Sequence[Mapping[str, Any]]
    ) -> str:
        """Returns the text of these calls as the model would write it, one per line if the format has one call per
        turn. `arguments` are the parsed arguments of the calls."""
        texts = [
            write(self.head, NAME=call.name, ID=call.id, INDEX=str(index))
            + self.arguments.write(values, tools[call.name])
            + write(self.tail, ID=call.id, INDEX=str(index))
            for index, (call, values) in enumerate(zip(calls, arguments))
        ]
        return self.opening + ("\n" if self.between is None else self.between).join(texts) + self.closing
