"""Scripted answers: a logits processor makes their tokens likely. Grammars, parsers and wire forms work as usual."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pace.llm.sampling.logits import LogitsProcessor
from pace.llm.text.token_bytes import TokenBytes

LIKELY = 1000.0
"""Added to a logit for each byte of its token, so that the longest matching token is chosen."""


class Script(LogitsProcessor):
    """Makes the answers to some prompts likely: the first whose key is in the prompt."""

    def __init__(self, tokenizer: Any, answers: dict[str, str]) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._bytes = TokenBytes.of(tokenizer)

    def apply(self, logits: Tensor) -> None:
        answer, said = self._answer(), b"".join(self._bytes[token] for token in self.seen[self.num_prompt_tokens :])
        if answer is None or not answer.startswith(said):
            return
        if answer == said:
            logits[self._tokenizer.eos_token_id] += LIKELY
        for token in range(len(self._tokenizer)):
            spelled = self._bytes[token]
            if spelled and answer.startswith(spelled, len(said)):
                logits[token] += LIKELY * len(spelled)

    def _answer(self) -> bytes | None:
        prompt = self._tokenizer.decode(self.seen[: self.num_prompt_tokens])
        return next((answer.encode() for part, answer in self._answers.items() if part in prompt), None)
