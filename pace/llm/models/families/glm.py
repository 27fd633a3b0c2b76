"""GLM-4-9B and GLM-4-0414: Llama with adjacent pairs rotated in half of each head. Queries, keys and values have
biases, and gate and up are one tensor. GLM-4-0414 also normalises the output of each branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.llm.models.rope_config import check_even, read_rope


@dataclass(frozen=True, kw_only=True)
class GlmConfig(LlamaConfig):
    vocab_size: int = count(151552)
    intermediate_size: int = count(13696)
    num_hidden_layers: int = count(40, MAX_LAYERS)
    num_key_value_heads: int | None = count(2, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1.5625e-07, 0.0, 1.0)
    attention_bias: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids((151329, 151336, 151338))
    pad_token_id: int | tuple[int, ...] | None = token_ids(151329)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    output_bias: ClassVar[bool] = False

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        positions = self.max_position_embeddings
        rope = read_rope(fields, head_dim, positions, partial=True, default_partial=0.5, interleaved=True)
        return check_even(rope, head_dim)


class GlmForCausalLM(LlamaForCausalLM):
    Config = GlmConfig
    gate_up_names = ("gate_up_proj",)


class Glm4ForCausalLM(GlmForCausalLM):
    post_norm_names = ("post_self_attn_layernorm", "post_mlp_layernorm")
