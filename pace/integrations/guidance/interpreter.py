"""Runs the nodes of guidance's programs: turns in the model's own chat template, and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from guidance._ast import LarkNode, RoleEnd, RoleStart, ToolCallNode
from guidance._tools import FunctionTool
from guidance.models._engine import EngineInterpreter, EngineState
from guidance.models._engine._interpreter import text_to_grammar
from guidance.trace import OutputAttr

from pace.integrations.guidance.engine import PaceEngine
from pace.integrations.guidance.templates import DerivedTemplate
from pace.llm.chat import TurnParser, read_tools
from pace.llm.chat.events import Text, calls_of
from pace.llm.chat.grammar import turn_grammar
from pace.llm.chat.template import ChatTemplate, special_tokens
from pace.llm.chat.tools import Tool, ToolCall, ToolChoice


class PaceState(EngineState):
    """The text of a branch and its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        """The finished turns."""
        self.previous_role: str | None = None
        self.turn_from = 0
        """Offset in the text at which the content of the current turn begins."""
        self.turn_to = 0
        """Offset in the text after the end of the last turn."""
        self.is_conversation = True
        """True if all text so far belongs to turns."""
        self.told: tuple[int, str] | None = None
        """A number of characters at the start of the text, and what the model reads in their place: the same turns
        rendered with tools."""

    @property
    def read(self) -> str:
        """The text that the model reads."""
        if self.told is None:
            return self.prompt
        num_characters, text = self.told
        return text + self.prompt[num_characters:]


class PaceInterpreter(EngineInterpreter):
    """One branch of a program. Copies share only the engine."""

    engine: PaceEngine
    state: PaceState

    def __init__(self, engine: PaceEngine) -> None:
        super().__init__(engine)
        self.state = PaceState()

    def get_role_start(self, role: str) -> str:
        if self.chat_template is None:
            raise ValueError("this model has no chat template: give one as chat_template, or use no roles")
        if not isinstance(self.chat_template, DerivedTemplate):
            return self.chat_template.get_role_start(role)
        if self.state.prompt and self.state.previous_role is None:
            return self.chat_template.get_role_start(role)
        return self.chat_template.start(role, self.state.previous_role)

    def role_start(self, node: RoleStart, **kwargs: Any) -> Iterator[OutputAttr]:
        state = self.state
        state.is_conversation &= len(state.prompt) == state.turn_to
        text = self.get_role_start(node.role)
        state.active_role = node.role
        yield from self._write(text)
        state.turn_from = len(state.prompt)

    def role_end(self, node: RoleEnd, **kwargs: Any) -> Iterator[OutputAttr]:
        state = self.state
        state.messages.append({"role": node.role, "content": state.prompt[state.turn_from :]})
        yield from self._end_turn(self.get_role_end(node.role))

    def tool_call(self, node: ToolCallNode, **kwargs: Any) -> Iterator[OutputAttr]:
        """Generates the rest of the assistant's turn: text, or calls in the form that the model was trained on. Runs
        the calls, and writes their results as turns, up to the assistant's next answer.

        From here on the model reads the conversation rendered with these tools. Raises ValueError outside of an
        assistant's turn, and NotImplementedError for tools that are not functions."""
        tools, template = self._tools(node), ChatTemplate(self.engine.hf_tokenizer)
        state = self.state
        if state.active_role != "assistant" or not state.is_conversation:
            raise ValueError(
                "tools are called in a turn of the assistant: `with assistant():`, and no text outside of turns"
            )
        state.told = state.turn_from, template.render(state.messages, tools)
        begins = len(state.prompt)
        reasoning = template.reasoning and template.reasoning.after(state.read)
        special = special_tokens(self.engine.hf_tokenizer)
        choice = ToolChoice(node.tool_choice)
        grammar = turn_grammar(template.format, tools, choice, node.parallel_tool_calls, reasoning, special)
        yield from self.grammar(LarkNode(lark_grammar=grammar), **kwargs)
        parser = TurnParser(template.format, tools, reasoning)
        events = parser.push(state.prompt[begins:]) + parser.close()
        if calls := calls_of(events):
            said = state.prompt[state.turn_from : begins]
            said += "".join(event.text for event in events if isinstance(event, Text))
            yield from self._answer(calls, said.strip(), node, tools, template)

    def _answer(
        self, calls: list[ToolCall], said: str, node: ToolCallNode, tools: list[Tool], template: ChatTemplate
    ) -> Iterator[OutputAttr]:
        """Runs the calls, and writes the text between them and the next answer."""
        state = self.state
        made = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        called = [*state.messages, {"role": "assistant", "content": said, "tool_calls": made}]
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _result(node, call)}
            for call in calls
        ]
        before = template.render(called, tools, begin_answer=False)
        after = template.render([*called, *results], tools)
        if not after.startswith(before):
            raise NotImplementedError("the chat template writes calls in another way once there are results")
        state.messages = [*called, *results]
        behind_id = re.split(r"\$[A-Z]+", template.format.tail + template.format.closing)[-1]
        last_words = behind_id.split()[-1:] or ["}"]  # end of the calls; the text after it ends the turn
        _, found, end = before.rpartition(last_words[0])
        yield from self._end_turn((end if found else self.get_role_end("assistant")) + after.removeprefix(before))
        state.active_role, state.turn_from = "assistant", len(state.prompt)

    def _end_turn(self, text: str) -> Iterator[OutputAttr]:
        state = self.state
        state.previous_role, state.active_role = state.active_role, None
        yield from self._write(text)
        state.turn_to = len(state.prompt)

    def _write(self, text: str) -> Iterator[OutputAttr]:
        if text:
            yield from self.run(text_to_grammar(self.engine.tokenizer, text))

    def _tools(self, node: ToolCallNode) -> list[Tool]:
        for tool in node.tools.values():
            if not isinstance(tool.tool, FunctionTool):
                raise NotImplementedError(f"{tool.name}: only functions are called, not tools of a regex or a grammar")
        if node.plaintext_regex is not None:
            raise NotImplementedError("plaintext_regex is not supported: the text next to calls is free")
        return read_tools([tool.with_name(name).to_openai_style() for name, tool in node.tools.items()])


def _result(node: ToolCallNode, call: ToolCall) -> str:
    """Calls a tool and returns its result as text."""
    result = node.tools[call.name].call(**json.loads(call.arguments))
    return result if isinstance(result, str) else json.dumps(result, default=str)
