"""`pace serve` on the bundled model, which answers some questions by a script: those that it is too small for.

    python -m tests.conformance.scripted_server SCRIPT [options of pace serve]

SCRIPT is the JSON text of an object: what a prompt contains, and the answer. A script stands in for weights alone. It
makes the tokens likely that spell the answer; the server, its grammars and its forms do the rest.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import Tensor

from pace.cli import main
from pace.llm.decoding.logits import LogitsProcessor
from pace.llm.decoding.token_bytes import TokenBytes
from pace.llm.generator import Generator
from pace.server import service

LIKELY = 1000.0
"""Added to a logit for each byte of its token, so that the longest token is taken of those that fit."""


class Script(LogitsProcessor):
    """Makes the answers to some prompts likely."""

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


class ScriptedService(service.Service):
    def use(self, generator: Generator) -> None:
        generator.defaults.logits_processors = [Script(generator.tokenizer, answers)]
        super().use(generator)


if __name__ == "__main__":
    answers = json.loads(sys.argv[1])
    service.Service = ScriptedService
    raise SystemExit(main(["serve", *sys.argv[2:]]))
