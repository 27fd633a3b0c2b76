"""Ernie 4.5 without experts: Llama with adjacent pairs rotated, and one option for all biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids


@dataclass(frozen=True, kw_only=True)
class Ernie45Config(LlamaConfig):
    vocab_size: int = count(103424)
    hidden_size: int = count(1024)
    intermediate_size: int = count(3072)
    num_hidden_layers: int = count(18, MAX_LAYERS)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(2, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    use_bias: bool = flag(False)
    tie_word_embeddings: bool = flag(True)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (False,), "mlp_bias": (False,)}
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 5e5, "interleaved": True}

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return super().derived(fields) | {"attention_bias": self.use_bias, "mlp_bias": self.use_bias}


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    Config = Ernie45Config
