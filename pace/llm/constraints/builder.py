"""Constraints on continuations: a grammar, the caller's token mask, the end of a healed prompt, a thinking budget."""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass
from typing import Any

from pace.grammar import Grammar
from pace.llm.chat.reasoning import Reasoning
from pace.llm.configs import SamplingConfig
from pace.llm.constraints.captures import CaptureReader
from pace.llm.constraints.grammars import GrammarCompiler
from pace.llm.constraints.healing import HealedPrompt, HealingMask, PromptHealer
from pace.llm.constraints.masks import TokenMask
from pace.llm.constraints.thinking import ThinkingMask, Thoughts, find_reasoning
from pace.llm.sequence import TextRules
from pace.llm.text.detokenizer import context_of

logger = logging.getLogger("pace")


@dataclass(frozen=True)
class Constraints:
    """Constraints on the continuations of one prompt, and the rules of their text."""

    text_rules: TextRules
    mask: TokenMask | None = None
    """Each sequence gets a fork of it."""
    captures: CaptureReader | None = None
    """Finds the grammar's captures; None without captures."""


class ConstraintBuilder:
    """Builds the constraints of one model's prompts. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.grammars = GrammarCompiler(tokenizer, vocab_size)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._healer: PromptHealer | None = None
        self._thoughts: dict[Reasoning, Thoughts] = {}
        self._lock = threading.Lock()

    def build(
        self,
        config: SamplingConfig,
        prompts: list[list[int]],
        end_tokens: list[int],
        continues: bool = True,
        hidden: frozenset[int] | None = None,
    ) -> tuple[list[tuple[list[int], Constraints]], tuple[str, ...]]:
        """Returns the tokens of each prompt, without those that token healing generates again, with its constraints.
        Also returns the parts of a JSON schema that are not enforced. `continues` is True if texts continue their
        prompts; `hidden` is as in `TextRules`. Raises ValueError for a grammar that cannot be used, and for a thinking
        budget if the model has no known thoughts."""
        grammar = config.make_grammar()
        warnings = () if grammar is None else grammar.left_out + self.grammars.compile(grammar).warnings
        for warning in warnings:
            _warn_once(warning)
        if config.token_healing:
            healed = list(map(self._prompt_healer().heal, prompts))
            masks = [self._healed_mask(prompt, grammar, end_tokens) for prompt in healed]
        else:
            healed = [HealedPrompt(prompt, "") for prompt in prompts]
            masks = [self._grammar_mask(grammar, end_tokens) if grammar else (config.token_mask, None)] * len(prompts)
        if (budget := config.thinking_budget) is not None:
            thoughts = self._thoughts_of_model()
            masks = [
                (ThinkingMask(thoughts, budget, prompt.tokens, mask), captures)
                for prompt, (mask, captures) in zip(healed, masks)
            ]
        return [
            (prompt.tokens, Constraints(self._rules(prompt, continues, hidden), mask, captures))
            for prompt, (mask, captures) in zip(healed, masks)
        ], warnings

    def _rules(self, prompt: HealedPrompt, continues: bool, hidden: frozenset[int] | None) -> TextRules:
        has_context = continues and self._tokenizer is not None
        return TextRules(context_of(prompt.tokens, self._tokenizer) if has_context else (), prompt.end, hidden)

    def _healed_mask(
        self, prompt: HealedPrompt, grammar: Grammar | None, end_tokens: list[int]
    ) -> tuple[TokenMask | None, CaptureReader | None]:
        if grammar is not None:
            return self._grammar_mask(grammar.after(prompt.end) if prompt.end else grammar, end_tokens)
        return HealingMask(self._prompt_healer(), prompt.end) if prompt.end else None, None

    def _grammar_mask(self, grammar: Grammar, end_tokens: list[int]) -> tuple[TokenMask, CaptureReader | None]:
        return self.grammars.mask(grammar, end_tokens), self.grammars.captures(grammar)

    def _thoughts_of_model(self) -> Thoughts:
        reasoning = find_reasoning(self._tokenizer)
        if reasoning is None:
            raise ValueError(
                "thinking_budget needs a model whose thoughts have known marks, such as <think> and </think>: the chat "
                "template of this one has none; leave it out"
            )
        with self._lock:
            if reasoning not in self._thoughts:
                self._thoughts[reasoning] = Thoughts(reasoning, self._tokenizer)
            return self._thoughts[reasoning]

    def _prompt_healer(self) -> PromptHealer:
        with self._lock:
            if self._healer is None:
                if self._tokenizer is None:
                    raise ValueError("token_healing needs text, and this model has no tokenizer; load one")
                self._healer = PromptHealer(self._tokenizer, self._vocab_size)
            return self._healer


@functools.lru_cache(maxsize=1024)
def _warn_once(warning: str) -> None:
    """Logs a part of a schema that is not enforced, unless it was logged recently: clients send the same schema with
    each request."""
    logger.warning("a JSON schema is not enforced in full: %s", warning)
