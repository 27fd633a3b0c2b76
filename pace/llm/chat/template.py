"""A tokenizer's chat template: messages and tools as the text that the model was trained on."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pace.llm.chat.format import ToolFormat
from pace.llm.chat.formats import detect_format
from pace.llm.chat.ids import nine_characters
from pace.llm.chat.reasoning import Reasoning, detect_reasoning
from pace.llm.chat.tools import Tool, ToolCall
from pace.naming import shown

Message = Mapping[str, Any]
_PROBE = Tool("zq_probe", "", {"type": "object", "properties": {"zq_key": {"type": "string"}}})
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Manner:
    """How a template takes calls in messages."""

    shown: bool
    """False where it leaves calls out."""
    results_shown: bool
    """False where it has no place for what a tool returned."""
    arguments_as_text: bool = False
    empty_content: str | None = None
    """What stands for no content beside calls."""


class TemplateRefusal(ValueError):
    """A chat template that does not take a conversation, or is none that can be read; names its file."""

    def __init__(self, file: str, error: Exception) -> None:
        self.reason = _reason(error)
        """Without the file, for those who are not to know it."""
        super().__init__(f"{file}: {self.reason}")


class ChatTemplate:
    """Renders messages as clients write them: content is a string, None or parts of type text, and the arguments of
    calls are JSON text. What a template wants otherwise is found by trying."""

    def __init__(self, tokenizer: Any, format: ToolFormat | None = None) -> None:
        """`format` stands in for the one that is detected. Raises ValueError where the tokenizer has no template."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("this model has no chat template: it was not made for conversations; give it plain text")
        self.tokenizer = tokenizer
        self._format = format

    @cached_property
    def source(self) -> str:
        """The template's text; that for tools where it has several."""
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            return template.get("tool_use") or template.get("default") or ""
        return template

    @cached_property
    def format(self) -> ToolFormat:
        """How the model writes calls."""
        return self._format or detect_format(self.source)

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """How the model marks its thoughts."""
        return detect_reasoning(self.source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        begin_answer: bool = True,
        continue_answer: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, up to where the answer begins.

        With `continue_answer` the last message goes on. `variables` are what the template may look at. A template that
        knows no tools is told of them in the first message.

        Raises TypeError for messages that are no dicts, ValueError for one without a role, content that is no text and
        arguments that are no JSON object, TemplateRefusal for what the template itself raises (roles that must alternate,
        say).
        """
        _check(messages)
        options = {"add_generation_prompt": begin_answer, "continue_final_message": continue_answer}
        options |= variables or {}
        if tools and not self._knows_tools:
            messages = self._told(messages, tools)
            tools = ()
        return self._apply(self._prepared(messages, tools), tools, options)

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        return list(self.tokenizer(self.render(messages, tools), add_special_tokens=False)["input_ids"])

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Tool], options: Mapping[str, Any]) -> str:
        given = {"tools": [tool.for_template() for tool in tools]} if tools else {}
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **given, **options)
        except Exception as error:  # whatever a template may come to
            raise TemplateRefusal(self._file, error) from error

    @property
    def _file(self) -> str:
        """Where the template stands."""
        path = Path(getattr(self.tokenizer, "name_or_path", None) or "")
        names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
        found = [path / name for name in names if (path / name).is_file()]
        return str(found[0] if found else path if path.is_file() else "the tokenizer's chat_template")

    @cached_property
    def _knows_tools(self) -> bool:
        question = [{"role": "user", "content": "zq_question"}]
        return _PROBE.name in self._try(question, [_PROBE])

    @cached_property
    def _manner(self) -> Manner:
        """The first manner in which the template shows a call as it is."""
        tools = [_PROBE] if self._knows_tools else []
        asked = {"role": "user", "content": "zq_question"}
        usual = self._try([asked], tools).count("None")
        call = ToolCall(self.format.make_id(_PROBE.name, 0), _PROBE.name, '{"zq_key": "zq_value"}')
        result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "zq_result"}
        for as_text in (False, True):
            for empty in (None, ""):
                answer = {"role": "assistant", "content": empty, "tool_calls": [_shown(call, as_text)]}
                text = self._try([asked, answer, result], tools)
                whole = all(word in text for word in (_PROBE.name, "zq_key", "zq_value", "zq_result"))
                as_python = "{'zq_key'" in text or text.count("None") > usual
                if whole and not as_python and '\\"zq_key' not in text:
                    return Manner(True, True, as_text, empty)
        text = self._try([asked, {"role": "assistant", "content": "zq_answer"}, result], tools)
        return Manner(False, result["content"] in text)

    def _try(self, messages: list[dict[str, Any]], tools: Sequence[Tool]) -> str:
        """The text, "" where the template refuses."""
        try:
            return self._apply(messages, tools, {"add_generation_prompt": True})
        except TemplateRefusal:
            return ""

    def _prepared(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
        known = {tool.name: tool for tool in tools}
        return [self._message(message, f"messages[{index}]", known) for index, message in enumerate(messages)]

    def _message(self, message: Message, place: str, tools: Mapping[str, Tool]) -> dict[str, Any]:
        made = {**message, "content": _text(message.get("content"), f"{place}.content")}
        calls = _calls(message.get("tool_calls") or (), f"{place}.tool_calls")
        made.pop("tool_calls", None)
        if made.get("tool_call_id"):
            made["tool_call_id"] = self._id(made["tool_call_id"])
        if calls and self._manner.shown:
            calls = [ToolCall(self._id(call.id), call.name, call.arguments) for call in calls]
            made["tool_calls"] = [_shown(call, self._manner.arguments_as_text) for call in calls]
            made["content"] = made["content"] or self._manner.empty_content
        elif calls:
            tools = {call.name: tools.get(call.name, Tool(call.name)) for call in calls}
            text = self.format.write(calls, tools, [json.loads(call.arguments) for call in calls])
            made["content"] = "\n".join(filter(None, [made["content"], text]))
        elif made["role"] == "tool" and not self._manner.results_shown:
            made["role"] = "user"
        return made

    def _id(self, given: str) -> str:
        """The id of a call, in the form that the format has: other ids are mapped, always to the same."""
        if self.format.make_id is not nine_characters or (len(given) == 9 and given.isalnum() and given.isascii()):
            return given
        digest = hashlib.sha256(given.encode()).digest()
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])

    def _told(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages, with a description of the tools and of the form of a call in the first."""
        listed = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
        form = self.format.opening + self.format.call + self.format.closing
        form = form.replace("$NAME", "NAME").replace("$ARGS", "ARGUMENTS").replace("$ID", "ID").replace("$INDEX", "0")
        told = f"You may call these tools:\n{listed}\nTo call one, answer with nothing but\n{form}"
        first, rest = dict(messages[0]), list(messages[1:])
        if first["role"] != "system":
            system = {"role": "system", "content": told}
            if self._try([system, {"role": "user", "content": "zq_question"}], ()):
                return [system, first, *rest]
        text = _text(first.get("content"), "messages[0].content")
        return [{**first, "content": f"{text}\n\n{told}" if first["role"] == "system" else f"{told}\n\n{text}"}, *rest]


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The ids of a tokenizer's special tokens by their names, as grammars may name them (`turn_grammar`)."""
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno} of the chat template is not Jinja: {error.message}"
    kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # that one has the template's own words
    return f"the chat template refuses these messages: {kind}{error}"


def _check(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"messages must be a list of dicts with role and content; got {messages!r:.60}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}] must be a dict with role and content; got {message!r:.60}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f'messages[{index}] must have a role, such as "user"; got {message!r:.60}')


def _text(content: Any, place: str) -> str:
    """A message's content as one string."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError(f"{place} must be text, or parts of type text; got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(
                f"{place}[{index}] must be a part of type text, as models read text only; got {shown(kind)}"
            )
        texts.append(text)
    return "".join(texts)


def _calls(items: Sequence[Any], place: str) -> list[ToolCall]:
    """The calls of a message of the assistant. Raises ValueError for other than calls with a JSON object."""
    if not isinstance(items, Sequence):
        raise ValueError(f"{place} must be a list of calls")
    calls = []
    for index, item in enumerate(items):
        where = f"{place}[{index}].function"
        function = item.get("function", item) if isinstance(item, Mapping) else {}
        name, arguments = function.get("name"), function.get("arguments", "{}")
        if not isinstance(name, str):
            raise ValueError(f"{where}.name must be a string")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        try:
            values = json.loads(arguments or "{}")
        except (TypeError, ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ValueError(f"{where}.arguments must be a JSON object, as text")
        calls.append(ToolCall(str(item.get("id", "")), name, arguments or "{}"))
    return calls


def _shown(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments = call.arguments if arguments_as_text else json.loads(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
