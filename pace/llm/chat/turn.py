"""Plans one answer: its prompt, its grammar, and its parser."""

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
from pace.llm.processors.prompts import MediaPart


@dataclass(frozen=True)
class Turn:
    """Plan of an answer, made before it is generated."""

    prompt: str
    """The text of the conversation up to the beginning of the answer."""
    grammar: Grammar | None
    """Constraint on the answer; None for free text."""
    format: ToolFormat
    tools: tuple[Tool, ...]
    """Tools that may be called."""
    choice: ToolChoice
    reasoning: Reasoning | None
    """Markers of reasoning; None if the answer has none."""
    hidden: frozenset[int]
    """Special tokens that are not part of the text: all except those that the parser looks for."""
    continues: bool = False
    """True if the answer continues text at the end of the prompt."""
    max_untagged: int | None = None
    """`max_untagged` of `TurnParser`: 0 unless the choice is "auto" and no grammar constrains the text."""
    media: tuple[MediaPart, ...] = ()
    """Images and sound of the conversation, one for each placeholder in the prompt, in order."""

    @property
    def is_plain(self) -> bool:
        """True if the answer is only text and needs no parser."""
        return not self.tools and self.reasoning is None and not self.format.answers_are_marked

    def parser(self) -> TurnParser:
        """Returns a new parser of the answer."""
        return TurnParser(self.format, self.tools, self.reasoning, max_untagged=self.max_untagged)


class TurnReader:
    """Parses an answer token by token, from the text that each token adds."""

    def __init__(self, turn: Turn) -> None:
        self.num_thought = 0
        """Number of reasoning tokens, without those of its marks."""
        self.has_called = False
        """True once a call is complete that the model chose to make."""
        self._turn = turn
        self._parser = turn.parser()
        self._events: list[Event] = []
        self._is_after_call = False

    def push(self, text: str) -> None:
        """Adds the text of a token; "" if its text is not certain yet, or if it has none."""
        was_thinking = self._parser.is_thinking
        self._take(self._parser.push(text) if text else [])
        self.num_thought += was_thinking and self._parser.is_thinking

    def drain(self, is_ended: bool) -> tuple[str, list[Event]]:
        """Returns the text of the answer and all events (including this text) since the last call."""
        if is_ended:
            self._take(self._parser.close())
        events, self._events = self._events, []
        if self._turn.choice.mode in ("required", "named"):  # a call cut before its name is not text
            events = [event for event in events if not isinstance(event, Text)]
        return "".join(event.text for event in events if isinstance(event, Text)), events

    def _take(self, events: list[Event]) -> None:
        self.has_called |= self._turn.choice.mode != "named" and any(isinstance(event, CallEnds) for event in events)
        self._events += [event for event in map(self._without_blank, events) if event is not None]

    def _without_blank(self, event: Event) -> Event | None:
        """Returns the event, without leading whitespace if it is text after a call; None if nothing remains."""
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
    """Plans the turn after `messages`.

    `choice` None lets the model call as it likes. `answer` constrains the text of a turn without calls; a turn that
    must be calls has no text. `begin_answer`, `continue_answer` and `variables` are passed to the template. Raises what
    `ChatTemplate.render` raises.
    """
    choice = choice or ToolChoice("auto" if tools else "none")
    told = tools if choice.mode != "none" else ()
    rendered = template.render_media(messages, told, begin_answer, continue_answer, variables)
    turn = turn_after(rendered.text, template, tools, choice, parallel, answer)
    return replace(turn, continues=continue_answer and bool(messages[-1].get("content")), media=rendered.media)


class AnswerStyle(Protocol):
    """The way in which a model writes answers. A `ChatTemplate` is one."""

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
    """Plans a turn like `plan_turn`, for a prompt made without a template. Only the end of the prompt matters."""
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
    format, marks = style.format, (reasoning.opening, reasoning.closing) if reasoning else ()
    fixed = (format.opening, format.call, format.between or "", format.closing, *format.reply, *format.preamble)
    literals = "".join((*fixed, *marks, format.arguments.quote))
    shown = {number for name, number in special.items() if name in literals}
    return replace(turn, hidden=hidden - shown)


@dataclass(frozen=True)
class _Held:
    """A tool with a schema that a grammar can enforce, and the details for errors and warnings."""

    tool: Tool
    given: GivenSchema
    left_out: tuple[str, ...] = ()


def _held(tool: Tool, place: str) -> _Held:
    """Removes the keywords that no grammar can enforce from a tool that is not strict."""
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
"""Placeholder for the grammar of the answer in a grammar of a turn."""


def _grammar(lark: str, answer: Grammar | None, held: Sequence[_Held] = ()) -> Grammar:
    """Combines the grammar of a turn with that of `@answer`."""
    parts: list[dict[str, Any]] = [{"name": "turn", "lark_grammar": lark}]
    if answer is not None:
        first, *others = json.loads(answer.source)["grammars"]
        parts += [{**first, "name": "answer"}, *others]
    schemas = tuple(each.given for each in held) + (answer.schemas if answer else ())
    left_out = tuple(note for each in held for note in each.left_out) + (answer.left_out if answer else ())
    return Grammar("turn", json.dumps({"grammars": parts}, ensure_ascii=False), schemas, left_out)
