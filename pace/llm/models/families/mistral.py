"""Mistral: Llama with a sliding window over all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_POSITIONS, count


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    intermediate_size: int = count(14336)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    sliding_window: int | None = count(4096, MAX_POSITIONS, optional=True)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (False,), "mlp_bias": (False,)}

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class MistralForCausalLM(LlamaForCausalLM):
    Config = MistralConfig
