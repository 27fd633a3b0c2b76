"""A model that generates a given script, for any tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from pace.llm.configs import SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from tests.llm.fake_model import OPS, FakeModel

LIKELY = 100.0


class ScriptedModel(FakeModel):
    """Generates `script` after a prompt of `num_prompt_tokens`, then only its end token."""

    def __init__(self, vocab_size: int, end: int) -> None:
        super().__init__(vocab_size)
        self.sharpness = 0.01
        self.end = end
        self.script: list[int] = []
        self.num_prompt_tokens = 0

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        logits = super().logits_of(tokens)
        index = len(tokens) - self.num_prompt_tokens
        logits[self.script[index] if 0 <= index < len(self.script) else self.end] += LIKELY
        return logits


def scripted(tokenizer: Any, **limits: Any) -> Generator:
    model = ScriptedModel(len(tokenizer), tokenizer.eos_token_id)
    engine = Engine.create(model, OPS, 500 * model.kv_spec.block_bytes, **limits)
    return Generator(engine, tokenizer, SamplingConfig(eos_token_id=tokenizer.eos_token_id))


def say(generator: Generator, prompt: list[int], script: list[int]) -> None:
    """Sets the tokens that follow this prompt from now on. They also follow other prompts of the same length."""
    generator.engine.model.num_prompt_tokens, generator.engine.model.script = len(prompt), script
