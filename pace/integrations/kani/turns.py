"""Plans turns: how to parse an answer, and its constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pace.llm import SamplingConfig
from pace.llm.chat import Reasoning, Tool, ToolChoice, ToolFormat, read_choice
from pace.llm.chat.turn import AnswerStyle, Turn, turn_after


@dataclass(frozen=True)
class PlainManner:
    """Answer style of a model without a chat template."""

    tokenizer: Any
    format: ToolFormat
    reasoning: Reasoning | None = None


class TurnPlanner:
    """Makes turns from prompts."""

    def __init__(self, style: AnswerStyle, is_parsed: bool, constrains: bool) -> None:
        """`is_parsed`: separate calls and reasoning from the text. `constrains`: constrain calls to known functions
        with a grammar."""
        self._style = style
        self._is_parsed = is_parsed
        self._constrains = constrains

    @property
    def markers(self) -> list[str]:
        """Strings that parsers look for in a text: added tokens, and delimiters of calls and reasoning."""
        format, reasoning = self._style.format, self._style.reasoning
        found = [format.opening, format.trigger, format.tail, format.closing]
        found += [reasoning.opening, reasoning.closing] if reasoning else []
        added = [token.content for token in self._style.tokenizer.added_tokens_decoder.values()]
        return [marker.strip() for marker in (*found, *added)]

    def plan(
        self,
        prompt: str,
        tools: Sequence[Tool],
        wanted: Mapping[str, Any],
        config: SamplingConfig,
        skips_special_tokens: bool,
    ) -> Turn:
        """Plans the turn after a prompt; only the end of the prompt matters. `wanted` holds the options of
        `hyperparams.TURN`, which apply if there are tools; `config` may constrain the text. Raises ValueError for an
        invalid choice."""
        choice = read_choice(wanted.get("tool_choice"), tools) if tools else ToolChoice("none")
        answer = config.make_grammar()
        turn = turn_after(prompt, self._style, tools, choice, wanted.get("parallel_tool_calls", True), answer)
        if answer is None and choice.mode == "auto" and not self._constrains:
            turn = replace(turn, grammar=None)
        if self._is_parsed:
            return turn
        hidden = frozenset(self._style.tokenizer.all_special_ids if skips_special_tokens else ())
        return replace(turn, tools=(), choice=ToolChoice("none"), reasoning=None, hidden=hidden)
