"""One answer to come: what the model reads, what it may write, and how that is understood."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pace.grammar import GivenSchema, Grammar, GrammarError
from pace.grammar.json_schema import check_optional
from pace.grammar.support import relaxed
from pace.llm.chat.events import CallEnds, Event, Text
from pace.llm.chat.format import ToolFormat
from pace.llm.chat.grammar import answer_grammar, turn_grammar
from pace.llm.chat.parser import TurnParser
from pace.llm.chat.reasoning import Reasoning
from pace.llm.chat.schemas import closed, for_grammar
from pace.llm.chat.template import ChatTemplate, Message, special_tokens
from pace.llm.chat.tools import Tool, ToolChoice


@dataclass(frozen=True)
class Turn:
    """What is known of an answer before it is generated."""

    prompt: str
    """The conversation as the model reads it, up to where the answer begins."""
    grammar: Grammar | None
    """What the answer may be; None for free text."""
    format: ToolFormat
    tools: tuple[Tool, ...]
    """Those that may be called."""
    choice: ToolChoice
    reasoning: Reasoning | None
    """How thoughts are marked; None where the answer has none."""
    hidden: frozenset[int]
    """Special tokens that are no text: all but those whose names the parser looks for."""
    continues: bool = False
    """Whether the answer goes on with a text that the prompt ends with."""
    max_untagged: int | None = None
    """As of `TurnParser`: where the model need not call, and no grammar says what its text is."""

    @property
    def is_plain(self) -> bool:
        """Whether the answer is text and nothing else, and needs no parser."""
        return not self.tools and self.reasoning is None and not self.format.answers_are_marked

    def parser(self) -> TurnParser:
        """A parser at the beginning of the answer."""
        return TurnParser(self.format, self.tools, self.reasoning, max_untagged=self.max_untagged)


class TurnReader:
    """Follows an answer, token by token, by the text that each makes certain."""

    def __init__(self, turn: Turn) -> None:
        self.num_thought = 0
        """Tokens of thoughts."""
        self.has_called = False
        """Whether a call is whole that the model chose to make."""
        self._turn = turn
        self._parser = turn.parser()
        self._events: list[Event] = []
        self._is_after_call = False

    def push(self, text: str) -> None:
        """Takes the text of a token, "" for one whose text is not certain yet, and for one that has none."""
        self.num_thought += self._parser.is_thinking
        self._take(self._parser.push(text) if text else [])

    def told(self, is_ended: bool) -> tuple[str, list[Event]]:
        """What came since the last call: the text of the answer, and all events, this text among them."""
        if is_ended:
            self._take(self._parser.close())
        events, self._events = self._events, []
        if self._turn.choice.mode in ("required", "named"):  # a call that was cut before its name is no text
            events = [event for event in events if not isinstance(event, Text)]
        return "".join(event.text for event in events if isinstance(event, Text)), events

    def _take(self, events: list[Event]) -> None:
        self.has_called |= self._turn.choice.mode != "named" and any(isinstance(event, CallEnds) for event in events)
        self._events += [event for event in map(self._without_blank, events) if event is not None]

    def _without_blank(self, event: Event) -> Event | None:
        """The event; of text behind a call, without the whitespace that it begins with."""
        if isinstance(event, Text) and self._is_after_call:
            event = Text(event.text.lstrip()) if not event.text.isspace() else None
        if event is not None:
            self._is_after_call = isinstance(event, CallEnds)
        return event


def plan_turn(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    parallel: bool = True,
    answer: Grammar | None = None,
    begin_answer: bool = True,
    continue_answer: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Turn:
    """The turn that follows `messages`. `choice` None lets the model call as it likes. `answer` is what its text must be
    where it calls nothing; a turn that must be calls has no text. `begin_answer`, `continue_answer` and `variables` are
    for the template. Raises what `ChatTemplate.render` does.
    """
    choice = choice or ToolChoice("auto" if tools else "none")
    told = tools if choice.mode != "none" else ()
    prompt = template.render(messages, told, begin_answer, continue_answer, variables)
    turn = turn_after(prompt, template, tools, choice, parallel, answer)
    return replace(turn, continues=continue_answer and bool(messages[-1].get("content")))


class AnswerStyle(Protocol):
    """How a model writes answers. A `ChatTemplate` is one."""

    tokenizer: Any
    format: ToolFormat
    reasoning: Reasoning | None


def turn_after(
    prompt: str,
    style: AnswerStyle,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    parallel: bool = True,
    answer: Grammar | None = None,
) -> Turn:
    """As `plan_turn`, for a prompt that no template made. Only its end is looked at."""
    choice = choice or ToolChoice("auto" if tools else "none")
    chosen = {tool.name for tool in choice.among(tools)}
    held = [_held(tool, f"tools[{index}]") for index, tool in enumerate(tools) if tool.name in chosen]
    callable_tools = tuple(each.tool for each in held)
    if callable_tools and choice.mode != "auto":
        answer = None
    reasoning = style.reasoning and style.reasoning.after(prompt)
    special = special_tokens(style.tokenizer)
    grammar = answer
    if callable_tools:
        grammar = _grammar(
            turn_grammar(style.format, callable_tools, choice, parallel, reasoning, special, answer is not None),
            answer,
            held,
        )
    elif answer is not None and (reasoning is not None or style.format.answers_are_marked):
        grammar = _grammar(answer_grammar(style.format, reasoning, special), answer)
    flagged = {number for number, token in style.tokenizer.added_tokens_decoder.items() if token.special}
    hidden = frozenset(style.tokenizer.all_special_ids) | flagged
    max_untagged = 0 if choice.mode != "auto" or answer is not None else None if parallel else 1
    turn = Turn(prompt, grammar, style.format, callable_tools, choice, reasoning, hidden, max_untagged=max_untagged)
    if turn.is_plain:
        return turn
    literals = "".join(
        [style.format.opening, style.format.call, style.format.between or "", style.format.closing]
        + [
            *style.format.reply,
            *style.format.preamble,
            *((reasoning.opening, reasoning.closing) if reasoning else ()),
        ]
    )
    shown = {number for name, number in special.items() if name in literals}
    return replace(turn, hidden=hidden - shown)


@dataclass(frozen=True)
class _Held:
    """A tool whose schema a grammar can hold, and what errors and warnings say of it."""

    tool: Tool
    given: GivenSchema
    left_out: tuple[str, ...] = ()


def _held(tool: Tool, place: str) -> _Held:
    """A tool that is not strict loses the keywords that no grammar can be made of."""
    title = f"the {'strict ' if tool.strict else ''}tool {tool.name!r}"
    try:
        check_optional(tool.parameters)
    except ValueError as error:
        raise GrammarError(f"{title} cannot be used: {error}", place) from None
    parameters, left_out = (tool.parameters, ()) if tool.strict else relaxed(tool.parameters)
    alone = json.dumps({"grammars": [{"json_schema": for_grammar(closed(parameters), tool.strict)}]})
    return _Held(
        replace(tool, parameters=parameters),
        GivenSchema(tool.parameters, alone, title, place),
        tuple(f"the tool {tool.name!r}: {note}" for note in left_out),
    )


ANSWER = "@answer"
"""What stands in a grammar of a turn for the grammar of its text."""


def _grammar(lark: str, answer: Grammar | None, held: Sequence[_Held] = ()) -> Grammar:
    """A grammar of a turn in which `@answer` is another one."""
    parts: list[dict[str, Any]] = [{"name": "turn", "lark_grammar": lark}]
    if answer is not None:
        first, *others = json.loads(answer.source)["grammars"]
        parts += [{**first, "name": "answer"}, *others]
    schemas = tuple(each.given for each in held) + (answer.schemas if answer else ())
    left_out = tuple(note for each in held for note in each.left_out) + (answer.left_out if answer else ())
    return Grammar("turn", json.dumps({"grammars": parts}, ensure_ascii=False), schemas, left_out)
