"""One description of how a family of models writes calls of tools. A grammar and a parser are made from it."""

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
    """How calls are written: `opening call (between call)* closing`.

    All of it is text in which special tokens stand by their names (`literals.py`). Whether a tokenizer has a token of
    such a name is asked when a grammar is made.
    """

    name: str
    call: str
    """One call, with the holes `$NAME` and `$ARGS`; an id that the model writes is `$ID` or `$INDEX`."""
    trigger: str
    """Beginning of `opening + call` that makes a call of what follows. It is a special token, or text that the answer
    had better not hold."""
    signs: tuple[str, ...] = ()
    """Fragments by which a chat template of this format is known: it has all of them."""
    opening: str = ""
    between: str | None = "\n"
    """None where a turn has one call at most."""
    closing: str = ""
    anywhere: bool = True
    """Whether text may come before and after calls. Otherwise a turn is one or the other, from its first character."""
    reply: tuple[str, str] = ("", "")
    """What stands around the text of an answer, where a format marks it, too. Of a mark that is whitespace, any is
    dropped."""
    preamble: tuple[str, str] = ("", "")
    """What stands around text that comes before calls or the answer, where a format marks it."""
    arguments: Arguments = field(default_factory=JsonArguments)
    make_id: IdRule = call_id

    @cached_property
    def head(self) -> str:
        """A call up to its arguments."""
        return self.call.partition("$ARGS")[0]

    @cached_property
    def tail(self) -> str:
        """A call from its arguments on."""
        return self.call.partition("$ARGS")[2]

    @property
    def answers_are_marked(self) -> bool:
        return bool(self.reply[0])

    def write(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], arguments: Sequence[Mapping[str, Any]]
    ) -> str:
        """The text of these calls, as the model would write it; each on a line where it writes one only. `arguments` are
        those of the calls, parsed."""
        texts = [
            write(self.head, NAME=call.name, ID=call.id, INDEX=str(index))
            + self.arguments.write(values, tools[call.name])
            + write(self.tail, ID=call.id, INDEX=str(index))
            for index, (call, values) in enumerate(zip(calls, arguments))
        ]
        return self.opening + ("\n" if self.between is None else self.between).join(texts) + self.closing
