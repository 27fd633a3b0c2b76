"""Mistral: Llama with a sliding window. Ministral (8B of October 2024) is the same, with the window in some layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.layer_types import FULL, SLIDING, check_layer_types, layer_types
from pace.llm.models.model_config import MAX_POSITIONS, count


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    intermediate_size: int = count(14336)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    sliding_window: int | None = count(4096, MAX_POSITIONS, optional=True)
    layer_types: tuple[str, ...] | None = layer_types()
    """The kind of each layer; null if all have the window."""

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (False,), "mlp_bias": (False,)}

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)
        if SLIDING in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError("config.json: sliding_window is null, but there are layers of sliding_attention")

    def window(self, layer: int) -> int | None:
        return None if self.layer_types and self.layer_types[layer] == FULL else self.sliding_window


class MistralForCausalLM(LlamaForCausalLM):
    Config = MistralConfig
