"""Helium 1: Llama with adjacent pairs rotated. Heads together are as wide as the hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, number, token_ids


@dataclass(frozen=True, kw_only=True)
class HeliumConfig(LlamaConfig):
    vocab_size: int = count(48000)
    hidden_size: int = count(2560)
    intermediate_size: int = count(7040)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(20)
    num_key_value_heads: int | None = count(20)
    head_dim: int | None = count(128, MAX_HEAD_DIM)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-8, 0.0, 1.0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(3)

    output_bias: ClassVar[bool] = False
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 1e5, "interleaved": True}

    def check(self) -> None:
        super().check()
        if self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                "config.json: num_attention_heads * head_dim must be hidden_size for Helium; got "
                f"{self.num_attention_heads} * {self.head_dim} and {self.hidden_size}"
            )


class HeliumForCausalLM(LlamaForCausalLM):
    Config = HeliumConfig
