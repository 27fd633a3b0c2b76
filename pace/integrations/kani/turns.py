"""How an answer is to be read, and what it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pace.llm import SamplingConfig
from pace.llm.chat import Reasoning, Tool, ToolChoice, ToolFormat, read_choice
from pace.llm.chat.turn import AnswerStyle, Turn, turn_after


@dataclass(frozen=True)
class PlainManner:
    """That of a model without a chat template."""

    tokenizer: Any
    format: ToolFormat
    reasoning: Reasoning | None = None


class TurnPlanner:
    """Makes turns of prompts."""

    def __init__(self, style: AnswerStyle, is_parsed: bool, constrains: bool) -> None:
        """`is_parsed`: whether calls and thoughts are parted from the text. `constrains`: whether calls are held to their
        functions by a grammar."""
        self._style = style
        self._is_parsed = is_parsed
        self._constrains = constrains

    @property
    def markers(self) -> list[str]:
        """What parsers look for in a text: added tokens, and what stands around calls and thoughts."""
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
        """The turn after a prompt, whose end is enough. `wanted` says of calls what `hyperparams.TURN` names, where there
        are tools; `config` what the text is to be. Raises ValueError for a choice that cannot be."""
        choice = read_choice(wanted.get("tool_choice"), tools) if tools else ToolChoice("none")
        answer = config.make_grammar()
        turn = turn_after(prompt, self._style, tools, choice, wanted.get("parallel_tool_calls", True), answer)
        if answer is None and choice.mode == "auto" and not self._constrains:
            turn = replace(turn, grammar=None)
        if self._is_parsed:
            return turn
        hidden = frozenset(self._style.tokenizer.all_special_ids if skips_special_tokens else ())
        return replace(turn, tools=(), choice=ToolChoice("none"), reasoning=None, hidden=hidden)
