"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    vocab_size: int = count(155136)
    intermediate_size: int = count(27648)
    num_hidden_layers: int = count(64, MAX_LAYERS)
    num_attention_heads: int = count(80)
    num_key_value_heads: int | None = count(8, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(524288, MAX_POSITIONS)
    attention_bias: bool = flag(True)
    attention_out_bias: bool = flag(False)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    @property
    def output_bias(self) -> bool:
        return self.attention_out_bias


class SeedOssForCausalLM(LlamaForCausalLM):
    Config = SeedOssConfig
