"""Grammar of one assistant turn in llguidance's Lark, made from the same description as its parser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pace.llm.chat.arguments import Rules
from pace.llm.chat.arguments.base import ANY_TEXT
from pace.llm.chat.format import ToolFormat
from pace.llm.chat.literals import ANY_BLANK, parts, pattern, terminals
from pace.llm.chat.reasoning import Reasoning
from pace.llm.chat.tools import Tool, ToolChoice

ANSWER = "@answer"
"""Placeholder for the grammar of the answer in a grammar of a turn."""
_JSON_PARTS = re.compile(r'"[^"]*"|[^"]')
"""JSON terminals in a literal: strings, punctuation, and blanks."""
FEW_BLANKS = r"/[ \t\r\n]{0,4}/"
"""Limited whitespace, so that a turn cannot consist of it."""


def turn_grammar(
    format: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool = True,
    reasoning: Reasoning | None = None,
    special: Mapping[str, int] | None = None,
    has_answer: bool = False,
) -> str:
    """Returns the grammar of a turn.

    With "auto" it is free text; a call must be valid once its trigger has been generated. With "required" it is only
    calls, with "named" one call. Reasoning may come first, and must end if the prompt began it; a trigger in reasoning
    is text. Without `parallel` there is at most one call. Some whitespace may follow the last call.
    `special` maps the tokenizer's special tokens to their ids. With `has_answer` a turn of "auto" is calls or
    `@answer`, another grammar, instead of free text.
    Raises ValueError if no tool may be called: such a turn is free text and needs no grammar.
    """
    chosen = choice.among(tools)
    if not chosen:
        raise ValueError("a turn without tools to call is free text and needs no grammar")
    parallel = parallel and format.between is not None and choice.mode != "named"
    turn = _Turn(format, chosen, parallel, Rules(special or {}))
    if choice.mode == "auto" and not has_answer:
        body = turn.free()
    else:
        is_like_answer = has_answer and (format.opening + format.call).startswith("{")
        calls = turn.json_calls() if is_like_answer else turn.section(turn.rules.add("opening", turn.opening()))
        body = f"{calls} {FEW_BLANKS}"
        body += f" | {_answer(format, turn.rules)}" if has_answer else ""
    is_free = choice.mode == "auto" and not has_answer and not format.answers_are_marked
    turn.rules.add("body", body)
    blank = ANY_BLANK if choice.mode == "auto" else r"[ \t\r\n]{0,2}"
    return _after_thoughts(
        format if choice.mode == "auto" else None, reasoning, turn.rules, blank, "" if is_free else FEW_BLANKS
    )


def answer_grammar(format: ToolFormat, reasoning: Reasoning | None, special: Mapping[str, int]) -> str:
    """Returns the grammar of a turn without calls, whose text is `@answer`. Reasoning may come before it, and the marks
    that the format has for an answer around it. All of these are optional, except for the end of reasoning that the
    prompt began."""
    rules = Rules(special)
    rules.add("body", f"{FEW_BLANKS} {_answer(format, rules)}")
    return _after_thoughts(format, reasoning, rules, r"[ \t\r\n]{0,2}")


def _answer(format: ToolFormat, rules: Rules) -> str:
    opening, closing = (terminals(mark, rules.special) for mark in format.reply)
    return " ".join(filter(None, [opening and f"({opening})?", ANSWER, closing and f"({closing})?"]))


def _after_thoughts(
    format: ToolFormat | None, reasoning: Reasoning | None, rules: Rules, blank: str, behind: str = ""
) -> str:
    """Returns the grammar of a turn whose rule `body` follows reasoning and the preamble of `format`. `blank` is the
    whitespace allowed before these, and `behind` the whitespace after them."""
    before = []
    if reasoning is not None:
        thought = rules.until("thought", reasoning.closing)
        before.append(f"{rules.until('thought_begins', reasoning.opening, before=blank)} {thought}")
    if format is not None and format.preamble[0]:
        begins = rules.until("preamble_begins", format.preamble[0], before=blank)
        before.append(f"{begins} {rules.until('preamble', format.preamble[1])}")
    begun = f"{thought} " if reasoning is not None and reasoning.begun else ""
    repeats = reasoning is not None and reasoning.repeats
    if not before or (begun and not repeats):
        rules.add("start", f"{begun}{behind if begun else ''} body")
    elif repeats:
        rules.add("start", f"{begun}({' | '.join(before)})* body")
    else:
        rules.add("start", f"body | ({' | '.join(before)}) {behind} body")
    return rules.text()


class _Turn:
    """Builds the rules of one turn. Methods return Lark expressions."""

    def __init__(self, format: ToolFormat, tools: Sequence[Tool], parallel: bool, rules: Rules) -> None:
        self._format = format
        self._tools = tools
        self._parallel = parallel
        self.rules = rules
        self._before, _, self._after = format.head.partition("$NAME")
        self._tail = terminals(format.tail, rules.special)
        self._arguments = [
            format.arguments.grammar(tool, rules, f"arguments_{index}") for index, tool in enumerate(tools)
        ]

    def opening(self) -> str:
        """Everything before the name of the first call."""
        return terminals(self._format.opening + self._before, self.rules.special)

    def section(self, opening: str) -> str:
        """One or more calls after `opening`, the text before the name of the first call."""
        calls = f"{opening} {self._named()}"
        if self._parallel:
            between = terminals(self._format.between + self._before, self.rules.special)
            calls += f" ({between} {self._named()})*"
        return f"{calls} {self._closing()}"

    def json_calls(self) -> str:
        """Calls as JSON objects, for turns in which an answer may also be JSON. Each terminal ends where a JSON
        terminal does, because the lexer takes the longest match and does not backtrack."""
        calls = []
        for index, tool in enumerate(self._tools):
            head = self._format.head.replace("$NAME", tool.name)
            begins = " ".join("(/ /)?" if part == " " else f"/{pattern(part)}/" for part in _JSON_PARTS.findall(head))
            calls.append(f"{begins} {self._arguments[index]} {self._tail}")
        call = self.rules.add("call", " | ".join(calls))
        if not self._parallel:
            return call
        return f"{call} ({terminals(self._format.between, self.rules.special)} {call})*"

    def free(self) -> str:
        """Text, with calls after their trigger."""
        if self._format.answers_are_marked:
            section = self.section(self.rules.add("opening", self.opening()))
            return f"{section} {FEW_BLANKS} | {self._marked_answer()}"
        if not self._format.anywhere:
            return f"{self._at_the_start()} | {ANY_TEXT}"
        trigger = self._format.trigger
        before = self._format.opening + self._before
        assert before.startswith(trigger), "a trigger begins a call"
        begins = self.rules.until("begins", trigger)
        rest = terminals(before.removeprefix(trigger), self.rules.special)
        if not self._parallel:
            return f"{self.section(f'{begins} {rest}')} {FEW_BLANKS} | {ANY_TEXT}"
        section = f"{begins} {rest} {self._named()} {self._closing()}"
        if self._format.closing:
            section = self.section(f"{begins} {rest}")
        return f"({self.rules.add('section', section)})* {ANY_TEXT}"

    def _at_the_start(self) -> str:
        """Calls of a turn that begins with the trigger, which may extend beyond the name."""
        trigger, head = self._format.trigger, self._format.opening + self._format.head
        assert head.startswith(trigger), "a trigger begins a call"
        first = []
        for index, tool in enumerate(self._tools):
            begins = self.rules.add(f"begins_{index}", f"/{_trigger(trigger, tool.name)}/", lazy=True)
            rest = terminals(head.removeprefix(trigger), self.rules.special, tool.name)
            first.append(f"{begins} {rest} {self._arguments[index]} {self._tail}")
        calls = self.rules.add("first", " | ".join(first))
        if self._parallel:
            between = terminals(self._format.between + self._before, self.rules.special)
            calls += f" ({between} {self._named()})*"
        return f"{calls} {self._closing()} {FEW_BLANKS}"

    def _named(self) -> str:
        """A call from its name onwards."""
        alternatives = []
        for index, tool in enumerate(self._tools):
            head = terminals("$NAME" + self._after, self.rules.special, tool.name)
            alternatives.append(f"{head} {self._arguments[index]} {self._tail}")
        return self.rules.add("named", " | ".join(alternatives))

    def _closing(self) -> str:
        return terminals(self._format.closing, self.rules.special)

    def _marked_answer(self) -> str:
        opening, closing = self._format.reply
        begins = terminals(opening, self.rules.special)
        return f"{begins} {self.rules.until('answer', closing) if closing else ANY_TEXT}"


def _trigger(literal: str, name: str) -> str:
    """Returns a regular expression for plain text at the beginning of a turn. It allows all whitespace that the parser
    accepts, so that the grammar and the parser agree on what is a call."""
    found = ANY_BLANK
    for part in parts(literal):
        found += ANY_BLANK if part.optional else pattern(name if part.kind == "NAME" else part.text)
    return found
