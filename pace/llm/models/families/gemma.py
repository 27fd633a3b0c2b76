"""Gemma 1 and CodeGemma: Llama with scaled embeddings, and norms with weights around 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.layers import RMSNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    count,
    flag,
    token_ids,
)


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    vocab_size: int = count(256000)
    hidden_size: int = count(3072)
    intermediate_size: int = count(24576)
    num_hidden_layers: int = count(28, MAX_LAYERS)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(16)
    head_dim: int | None = count(256, MAX_HEAD_DIM)
    hidden_act: str = activation("gelu_tanh")
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(2)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    without_effect: ClassVar[dict[str, tuple]] = {"hidden_activation": (None, "gelu_pytorch_tanh")}

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The first checkpoints name their activation `gelu`, but were trained with its approximation."""
        approximated = {"hidden_act": "gelu_tanh"} if fields.get("hidden_act") == "gelu" else {}
        return super().derived(fields) | approximated


class GemmaForCausalLM(LlamaForCausalLM):
    Config = GemmaConfig

    def make_norm(self, name: str) -> RMSNorm:
        return RMSNorm(name, self.config.hidden_size, self.config.rms_norm_eps, offset=1.0)

    @property
    def embedding_scale(self) -> float:
        """sqrt(hidden_size), rounded to the weights' dtype, as `transformers` does."""
        return torch.tensor(self.config.hidden_size**0.5).to(self.dtype).item()
