"""Renders messages and tools with a tokenizer's chat template, to text that the model was trained on."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pace.llm.chat.format import ToolFormat
from pace.llm.chat.formats import detect_format
from pace.llm.chat.ids import nine_characters
from pace.llm.chat.messages import (
    Message,
    Said,
    calls_apart,
    instruction_forms,
    num_instructions,
    read_messages,
    results_as_users,
    text_apart,
)
from pace.llm.chat.reasoning import Reasoning, detect_reasoning
from pace.llm.chat.rendering import Rendering, TemplateRefusal, log_moved_instructions, plain_message
from pace.llm.chat.tools import Tool, ToolCall
from pace.llm.processors.prompts import NO_MEDIA, NOUNS, MediaPart, PromptEncoder
from pace.naming import check_text

_PROBE = Tool("zq_probe", "", {"type": "object", "properties": {"zq_key": {"type": "string"}}})
_LETTERS = string.ascii_letters + string.digits
NEVER_ASSISTANT = ("system", "developer", "tool")
"""Roles that some templates show as the assistant's, because they treat every role except the user's alike."""
_THOUGHT = "reasoning_content"
_OTHER_THOUGHTS = ("thinking", "reasoning")
"""Other names under which templates look for reasoning."""
_SWITCH = "enable_thinking"
_OTHER_SWITCHES = {"thinking": True, "force_reasoning": True, "skip_thinking": False, "skip_reasoning": False}
"""Other variables that turn thoughts on or off -> their value for thoughts."""


@dataclass(frozen=True)
class Manner:
    """The form in which a template accepts calls in messages, and their results."""

    calls: Literal["together", "apart", "text"] = "together"
    """Calls of one message stay together, become separate turns, or are written into the content."""
    results: Literal["tool", "user"] = "tool"
    """Role of a tool's result."""
    result_in_parts: bool = False
    text_apart: bool = False
    """True if text next to calls becomes a separate turn."""
    arguments_as_text: bool = False
    empty_content: str | None = None
    """Content of a message that has only calls."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    media: tuple[MediaPart, ...]
    """Images and sound, one for each placeholder in the text, in order."""


class _Way(NamedTuple):
    """A conversation in a form that a template may accept."""

    turns: list[Said]
    tools: Sequence[Tool]
    """Tools passed to the template."""
    manner: Manner


class ChatTemplate:
    """Renders messages as clients write them: content is a string, None or parts of type text, image or audio. The
    arguments of calls are JSON text. The forms that a template needs instead are found by trying."""

    def __init__(self, tokenizer: Any, format: ToolFormat | None = None, encoder: PromptEncoder = NO_MEDIA) -> None:
        """`format` overrides the detected format. `encoder` knows the media that the model takes. Raises ValueError if
        the tokenizer has no template."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "this model has no chat template: it was not made for conversations; give it plain text (`pace "
                "generate`, LLMModel.generate, /v1/completions)"
            )
        self.tokenizer = tokenizer
        self._format = format
        self._encoder = encoder
        self._rendering = Rendering(tokenizer, encoder.processors)

    @cached_property
    def source(self) -> str:
        """The text of the template; the one for tools if there are several."""
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            return template.get("tool_use") or template.get("default") or ""
        return template

    @cached_property
    def format(self) -> ToolFormat:
        """The format of the model's calls."""
        return self._format or detect_format(self.source)

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """The markers of the model's reasoning; None if it has none."""
        return detect_reasoning(self.source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        begin_answer: bool = True,
        continue_answer: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of `render_media`."""
        return self.render_media(messages, tools, begin_answer, continue_answer, variables).text

    def render_media(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        begin_answer: bool = True,
        continue_answer: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Renders a conversation, up to the beginning of the answer.

        With `continue_answer` the last message is continued. `variables` are passed to the template. For a template
        without support for tools, they are described in the first message. A template may omit or reject calls, results
        or instructions, or show them as the assistant's. These are then passed as separate turns, as text, or as turns
        of the user.
        Raises TypeError for messages that are not dicts. Raises ValueError for a message without a role, content that
        is neither text nor media, and arguments that are not a JSON object. The same for media that the model does not
        take. Raises TemplateRefusal for an error of the template, such as roles that must alternate, and for a message
        that it would omit.
        """
        options = {"add_generation_prompt": begin_answer, **self._with_switches(variables or {})}
        given = read_messages(messages)
        for part in (part for turn in given for _, part in turn.media):
            self._encoder.check_kind(part)
        for said in instruction_forms(given):
            way, lost = self._choose_way(said, tools, options, continue_answer)
            if lost is None:
                break
        if num_instructions(said) < num_instructions(given):
            log_moved_instructions(self._rendering.file, self.source)
        prepared = [self._prepared(turn, way.manner) for turn in way.turns]
        text = self._rendering.text(prepared, way.tools, options | {"continue_final_message": continue_answer})
        if lost:
            reason = f"the chat template leaves out {lost}, so that the model would not read it"
            raise TemplateRefusal(self._rendering.file, reason)
        return Rendered(text, tuple(part for turn in way.turns for _, part in turn.media))

    def _with_switches(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables, with `enable_thinking` under the names that the template has for it."""
        found = dict(variables)
        enabled = found.get(_SWITCH)
        if isinstance(enabled, bool) and _SWITCH not in self.source:
            for name, value in _OTHER_SWITCHES.items():
                if re.search(rf"(?<![\w.'\"]){name}\b", self.source):
                    found.setdefault(name, enabled == value)
        return found

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the token ids of a conversation, up to the beginning of the answer."""
        text = self.render(messages, tools)
        check_text(text, "the conversation")
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # -- forms that the template accepts -------------------------------------------------------------------------------

    def _choose_way(
        self, said: list[Said], tools: Sequence[Tool], options: Mapping[str, Any], continue_answer: bool
    ) -> tuple[_Way, str | None]:
        """Returns the first form in which the template shows the whole conversation, and None.

        If there is none, returns the first form, and the place that the first accepted form omits; "" if the template
        rejects all forms."""
        if continue_answer:
            options = {**options, "add_generation_prompt": False}
        first: _Way | None = None
        left_out = ""
        for way in self._ways(said, tools):
            first = first or way
            try:
                lost = self._lost(way, options)
            except TemplateRefusal:
                continue
            if lost is None:
                return way, None
            left_out = left_out or lost
        return first, left_out

    def _ways(self, said: list[Said], tools: Sequence[Tool]) -> Iterator[_Way]:
        """Yields forms of a conversation to try with the template, the best first."""
        has_calls = any(turn.calls or turn.role == "tool" for turn in said)
        for told in (False, True) if tools and self._knows_tools else (bool(tools),):
            turns, given = (self._told(said, tools), ()) if told else (said, tools)
            for manner in self._manners if has_calls else (Manner(),):
                yield _Way(self._turns(turns, tools, manner), given, manner)

    def _turns(self, said: list[Said], tools: Sequence[Tool], manner: Manner) -> list[Said]:
        """Returns the turns of a conversation in this form."""
        turns = list(text_apart(said)) if manner.text_apart else said
        if manner.calls == "apart":
            turns = list(calls_apart(turns))
        if manner.calls == "text":
            known = {tool.name: tool for tool in tools}
            turns = [self._with_calls_as_text(turn, known) for turn in turns]
        return list(results_as_users(turns)) if manner.results == "user" else turns

    def _lost(self, way: _Way, options: Mapping[str, Any]) -> str | None:
        """Returns the place of a part of the conversation that the template omits; None if it omits nothing. All texts
        are replaced by marker words, because templates may escape or trim texts. Raises TemplateRefusal."""
        words: dict[str, str] = {}
        marked = []
        for number, turn in enumerate(way.turns):
            marks = [f"zq{number}t{at}x" if isinstance(one, str) else one for at, one in enumerate(turn.pieces)]
            words |= {one: f"{turn.place}.content, of the role {turn.role!r}" for one in marks if isinstance(one, str)}
            calls = []
            for index, call in enumerate(turn.calls):
                word = f"zq{number}c{index}x"
                words[word] = f"{turn.place}.tool_calls, of which it shows none or some"
                calls.append(replace(call, arguments=json.dumps({"zq_key": word})))
            marked.append(self._prepared(replace(turn.of_pieces(marks), calls=tuple(calls)), way.manner))
        shown = self._rendering.text(marked, way.tools, options)
        called = [call.name for turn in way.turns for call in turn.calls]
        for index, tool in enumerate(way.tools):
            if shown.count(tool.name) <= called.count(tool.name):
                return f"tools[{index}]"
        if (place := next((place for word, place in words.items() if word not in shown), None)) is not None:
            return place
        for kind, processor in self._rendering.processors.items():
            parts = [part for turn in way.turns for _, part in turn.media if part.kind == kind]
            if shown.count(processor.marker) < len(parts):
                return parts[0].where or NOUNS[kind]
        mistaken = self._mistaken(marked, way.tools, options, shown)
        if mistaken is None:
            return None
        turn = way.turns[mistaken]
        return f"{turn.place}.content, of the role {turn.role!r}, or gives it to the assistant"

    def _mistaken(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], options: Mapping[str, Any], shown: str
    ) -> int | None:
        """Index of a message that is not the assistant's but is shown as such; None if there is none. Messages of one
        role are tried together, except for the very first message, which templates may treat differently."""
        groups: dict[tuple[str, bool], list[int]] = {}
        for index, message in enumerate(messages):
            if message["role"] in NEVER_ASSISTANT:
                groups.setdefault((message["role"], index == 0), []).append(index)
        for indices in groups.values():

            def said_by(role: str) -> str:
                others = [message | {"role": role} if k in indices else message for k, message in enumerate(messages)]
                try:
                    return self._rendering.text(others, tools, options)
                except TemplateRefusal:
                    return ""

            if said_by("assistant") == shown != said_by("user"):
                return indices[0]
        return None

    @cached_property
    def _manners(self) -> list[Manner]:
        """Forms of calls to try, the best first: those that show a call and its result as they are, then calls as
        text."""
        found = []
        if (best := self._best_manner) is not None:
            found = [
                replace(best, calls=calls, text_apart=apart)
                for apart in (False, True)
                for calls in ("together", "apart")
            ]
        for in_parts in (False, True):
            message = self._rendering.message
            conversation = [message("user", "zq_question"), message("assistant", "zq_answer")]
            if "zq_result" in self._rendering.attempt([*conversation, plain_message("tool", "zq_result", in_parts)]):
                found.append(Manner("text", "tool", in_parts))
                break
        return [*found, Manner("text", "user")]

    @cached_property
    def _best_manner(self) -> Manner | None:
        """The first form in which the template shows a call and its result; None if there is none."""
        tools = [_PROBE] if self._knows_tools else []
        asked = self._rendering.message("user", "zq_question")
        usual = self._rendering.attempt([asked], tools).count("None")
        call = ToolCall(self.format.make_id(_PROBE.name, 0), _PROBE.name, '{"zq_key": "zq_value"}')
        answer, result = (
            Said("", "assistant", calls=(call,)),
            Said("", "tool", "zq_result", (), {"tool_call_id": call.id, "name": call.name}),
        )
        for role, in_parts, as_text, empty in itertools.product(
            ("tool", "user"), (False, True), (False, True), (None, "")
        ):
            if role == "user" and in_parts:
                continue
            manner = Manner("together", role, in_parts, False, as_text, empty)
            turns = [self._prepared(turn, manner) for turn in self._turns([answer, result], tools, manner)]
            text = self._rendering.attempt([asked, *turns], tools)
            whole = all(word in text for word in (_PROBE.name, "zq_key", "zq_value", "zq_result"))
            as_python = "{'zq_key'" in text or text.count("None") > usual
            if whole and not as_python and '\\"zq_key' not in text:
                if self._mistaken([asked, *turns], tools, {"add_generation_prompt": True}, text) is None:
                    return manner
        return None

    @cached_property
    def _knows_tools(self) -> bool:
        return _PROBE.name in self._rendering.attempt([self._rendering.message("user", "zq_question")], [_PROBE])

    # -- messages in the template's form -------------------------------------------------------------------------------

    def _prepared(self, turn: Said, manner: Manner) -> dict[str, Any]:
        """Returns a turn as a message for the template."""
        if turn.role == "tool":
            made = plain_message("tool", turn.text, manner.result_in_parts)
        else:
            made = self._rendering.message(turn.role, *turn.pieces)
        made |= turn.others or {}
        if made.get("tool_call_id"):
            made["tool_call_id"] = self._id(made["tool_call_id"])
        if self._other_thought is not None and _THOUGHT in made:
            made[self._other_thought] = made[_THOUGHT]
        if (thought := made.get(_THOUGHT)) and turn.role == "assistant" and self._has_thoughts_in_content:
            made |= self._rendering.message("assistant", self._with_thought(thought, turn.text))
        if turn.calls:
            made["content"] = made["content"] if turn.text else manner.empty_content
            made["tool_calls"] = [self._shown(call, manner.arguments_as_text) for call in turn.calls]
        return made

    @cached_property
    def _other_thought(self) -> str | None:
        """The other name under which the template expects reasoning; None if it knows the usual one, or none."""
        if _THOUGHT in self.source:
            return None
        uses = (rf"\.{name}\b|['\"]{name}['\"]" for name in _OTHER_THOUGHTS)
        return next((name for name, use in zip(_OTHER_THOUGHTS, uses) if re.search(use, self.source)), None)

    @cached_property
    def _has_thoughts_in_content(self) -> bool:
        """True if the template only looks for reasoning in the content, and shows that of the last answer."""
        if self.reasoning is None or _THOUGHT in self.source or self._other_thought is not None:
            return False
        if not any(f"split({quote}{self.reasoning.closing}{quote})" in self.source for quote in "'\""):
            return False
        message = self._rendering.message
        talk = [message("user", "zq_question"), message("assistant", self._with_thought("zq_thought", "zq_answer"))]
        return "zq_thought" in self._rendering.attempt([*talk, message("user", "zq_question")])

    def _with_thought(self, thought: str, content: str) -> str:
        return f"{self.reasoning.opening}\n{thought.strip()}\n{self.reasoning.closing}\n\n{content}"

    def _shown(self, call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
        arguments = call.arguments if arguments_as_text else json.loads(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _with_calls_as_text(self, turn: Said, tools: Mapping[str, Tool]) -> Said:
        """Moves calls into the content, as the model would write them."""
        if not turn.calls:
            return turn
        known = {call.name: tools.get(call.name, Tool(call.name)) for call in turn.calls}
        text = self.format.write(turn.calls, known, [json.loads(call.arguments) for call in turn.calls])
        return replace(turn, text="\n".join(filter(None, [turn.text, text])), calls=())

    def _id(self, given: str) -> str:
        """Returns the id of a call in the format's form; other ids are mapped deterministically."""
        if self.format.make_id is not nine_characters or (len(given) == 9 and given.isalnum() and given.isascii()):
            return given
        digest = hashlib.sha256(given.encode()).digest()
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])

    def _told(self, said: list[Said], tools: Sequence[Tool]) -> list[Said]:
        """Returns the messages with a description of the tools and of the call format in the first one."""
        listed = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
        form = self.format.opening + self.format.call + self.format.closing
        form = form.replace("$NAME", "NAME").replace("$ARGS", "ARGUMENTS").replace("$ID", "ID").replace("$INDEX", "0")
        told = f"You may call these tools:\n{listed}\nTo call one, answer with nothing but\n{form}"
        first, rest = said[0], said[1:]
        if first.role != "system" and (self._rendering.shows("system", False) or self._rendering.shows("system", True)):
            return [Said("tools", "system", told), first, *rest]
        pieces = [first.text, f"\n\n{told}"] if first.role == "system" else [f"{told}\n\n", *first.pieces]
        return [first.of_pieces(pieces), *rest]


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Maps a tokenizer's special tokens to their ids, for grammars (`turn_grammar`)."""
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }
