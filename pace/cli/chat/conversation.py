"""The messages of a conversation, and how they are shortened when the context is full."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pace.cli.chat.attachments import with_media
from pace.llm.chat import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought, ToolCall, read_tools
from pace.llm.chat.template import ChatTemplate
from pace.llm.processors.prompts import MediaPart, Prompt
from pace.naming import counted

if TYPE_CHECKING:
    from pace.llm import ChatOutput

WARN_AT = 0.8
"""Fraction of the context that the conversation may fill before the user is warned."""
KEEP = 0.5
"""Fraction of the context kept when it is full. More is dropped than the next answer needs, because each time the
oldest turns go, all remaining ones must be prefilled again."""
MOST_ROOM = 0.125
"""Fraction of the context reserved for an answer, if `max_new_tokens` allows one of this length. It is below 1 -
WARN_AT, so that the warning comes first."""


class Conversation:
    """The messages so far, and the model that continues them."""

    def __init__(
        self,
        model,
        config,
        system: str | None,
        tools: list | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ):
        """`notice` is called with messages for the user that are not part of an answer. Raises ValueError if the model
        has no chat template."""
        self.model, self.config, self.tools, self.notice = model, config, tools, notice
        self.encoder = model.generator.encoder
        self.adapter: list[tuple[str, float]] | None = None
        """Adapters of the answers."""
        self._template = ChatTemplate(model.tokenizer, None, self.encoder)
        self._known_tools = read_tools(tools or [])
        self.restart(system)

    def restart(self, system: str | None) -> None:
        """Removes all messages; `system` None means no system prompt."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []
        self.open_calls: list[ToolCall] = []
        """Tool calls that have no result yet."""
        self.last: ChatOutput | None = None
        """The last answer."""
        self.attached: list[MediaPart] = []
        """Images and sound that are sent with the next question."""
        self._is_warned = False

    def resume(self, messages: list[dict]) -> None:
        """Replaces the conversation by these messages, in the form in which chat clients save them. Raises TypeError or
        ValueError, and changes nothing, if the model's template rejects them."""
        if messages != []:
            self._template.render(messages, self._known_tools, begin_answer=False)
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        self.restart(system)
        self.messages, self.open_calls = messages, _open_calls(messages)

    @property
    def num_tokens(self) -> int:
        """Tokens of the context in use after the last answer."""
        return self.last.metrics.num_prompt_tokens + self.last.metrics.num_generated_tokens if self.last else 0

    def answer(self, said: str) -> Iterator[str]:
        """Yields the answer in pieces. `said` is a question, or the result of the first open tool call. While other
        calls are open, there is no answer. What is attached is sent before the text.

        `said` and the answer join the messages when the answer ends, Ctrl-C stops it or the iterator is closed. If the
        model raises, neither is kept.

        Raises ValueError for a question that is longer than the context."""
        call = self.open_calls[0] if self.open_calls else None
        message = {"role": "user", "content": with_media(self.attached, said)}
        if call is not None:
            message |= {"role": "tool", "tool_call_id": call.id, "name": call.name}
        messages = [*self.messages, message]
        if len(self.open_calls) > 1:
            self.messages, self.open_calls, self.attached = messages, self.open_calls[1:], []
            return
        yield from self._answer(messages)

    def answer_again(self) -> Iterator[str]:
        """Yields another answer to the last message. It replaces the previous answer when it ends or is stopped. Raises
        ValueError if there is no answer yet."""
        if (last := _last_answer(self.messages)) is None:
            raise ValueError("there is no answer yet to generate again")
        before = self.messages[last]
        yield from self._answer(self.messages[:last])
        if self.messages[-1] == before:
            self.notice("(the same again: a higher temperature draws others, and so does another seed)")

    def _answer(self, messages: list[dict]) -> Iterator[str]:
        messages = self._fitted(messages)
        answer = self.model.chat(messages, self.config, tools=self.tools, stream=True, adapter=self.adapter)
        try:
            yield from map(_shown, answer)
        except (KeyboardInterrupt, GeneratorExit):
            answer.close()
            with suppress(ValueError):  # generation had not begun
                self._keep(messages, answer.output)
            raise
        self._keep(messages, answer.output)
        self._tell_of_end()

    def _keep(self, messages: list[dict], output: ChatOutput) -> None:
        self.last = output
        self.open_calls = output.tool_calls if output.finish_reason == "tool_calls" else []
        message = output.message if self.open_calls else {"role": "assistant", "content": output.text}
        self.messages, self.attached = [*messages, message], []

    def _tell_of_end(self) -> None:
        """Notifies the user if the answer was cut off or is empty, or if the context is nearly full."""
        used, most = self.num_tokens, self.model.max_seq_len
        if self.last.finish_reason == "length":
            length = counted(self.last.metrics.num_generated_tokens, "token")
            advice = "/set max_new_tokens N allows more" if used < most else "the context is full"
            self.notice(f"(the answer is cut off after {length}: {advice})")
        elif not self.last.text.strip() and not self.open_calls:
            self.notice("(the answer is empty; /regen asks again)")
        if used >= WARN_AT * most and not self._is_warned:
            self._is_warned = True
            self.notice(
                f"(the conversation fills {100 * used // most} % of the context of {most} tokens; the oldest turns "
                "will be forgotten. /reset starts again)"
            )

    # -- a full context ------------------------------------------------------------------------------------------------

    def _fitted(self, messages: list[dict]) -> list[dict]:
        """Returns the messages, without the oldest turns if they leave too little room for an answer. The system prompt
        and the last turn always stay."""
        most = self.model.max_seq_len
        room = min(self.config.max_new_tokens or most, int(MOST_ROOM * most))
        if self._count(messages) + room <= most:
            return messages
        first, turns = _turns(messages)

        def without(num_turns: int) -> list[dict]:
            return [*first, *(message for turn in turns[num_turns:] for message in turn)]

        num_turns = bisect_left(
            range(len(turns) - 1), True, key=lambda number: self._count(without(number)) <= KEEP * most
        )
        messages = without(num_turns)
        if (length := self._count(messages)) >= most:
            raise ValueError(
                f"the prompt with this message has {length} tokens, but the context holds {most} with the answer; "
                f"shorten it"
            )
        if num_turns:
            oldest = "oldest turn is" if num_turns == 1 else f"{num_turns} oldest turns are"
            self.notice(f"(the context of {most} tokens is full: the {oldest} forgotten)")
            self._is_warned = False
        return messages

    def beginning(self) -> Prompt:
        """What the prompt of a next question begins with, as far as the context holds it."""
        if not self.messages:
            return Prompt([])
        return self._encoded(self.messages, begin_answer=False).beginning(self.model.max_seq_len)

    def _count(self, messages: list[dict]) -> int:
        """Tokens of the messages in the model's template."""
        return len(self._encoded(messages).tokens)

    def _encoded(self, messages: list[dict], begin_answer: bool = True) -> Prompt:
        shown = self._template.render_media(messages, self._known_tools, begin_answer=begin_answer)
        return self.encoder.encode(shown.text, shown.media, self.model.tokenizer, add_special_tokens=False)


def _turns(messages: list[dict]) -> tuple[list[dict], list[list[dict]]]:
    """Splits messages into those before the first question, and turns: a question and everything up to the next."""
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    ends = [*starts[1:], len(messages)]
    return messages[: min(starts, default=None)], [messages[start:end] for start, end in zip(starts, ends)]


def _last_answer(messages: list[dict]) -> int | None:
    """Index of the last answer."""
    return max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=None)


def _open_calls(messages: list[dict]) -> list[ToolCall]:
    """Tool calls of the last answer that have no result yet. Results arrive in the order of the calls."""
    if (last := _last_answer(messages)) is None or any(message["role"] != "tool" for message in messages[last + 1 :]):
        return []
    calls = [(call.get("id", ""), call["function"]) for call in messages[last].get("tool_calls") or ()]
    calls = [ToolCall(id, function["name"], function.get("arguments", "{}")) for id, function in calls]
    return calls[len(messages) - last - 1 :]


def _shown(event: Event) -> str:
    """Text of an event on stdout. Reasoning is printed on stderr instead."""
    match event:
        case Text(text):
            return text
        case Thought(text):
            print(text, end="", file=sys.stderr, flush=True)
        case CallBegins(index, _, name):
            return ("\n" if index else "") + f"{name}("
        case ArgumentsPiece(text=text):
            return text
        case CallEnds():
            return ")"
    return ""
