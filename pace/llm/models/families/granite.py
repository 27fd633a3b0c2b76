"""Granite 3: Llama with factors for embeddings, scores, branches and logits."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import number


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    embedding_multiplier: float = number(1.0, 1e-9, 1e9)
    attention_multiplier: float = number(1.0, 1e-9, 1e9)
    residual_multiplier: float = number(1.0, 1e-9, 1e9)
    logits_scaling: float = number(1.0, 1e-9, 1e9)

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier

    @property
    def branch_scale(self) -> float:
        return self.residual_multiplier

    @property
    def logits_scale(self) -> float:
        return 1.0 / self.logits_scaling


class GraniteForCausalLM(LlamaForCausalLM):
    Config = GraniteConfig
