"""Common parts of families with latent attention: the fields of their configs, and their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pace.batch import Latent
from pace.llm.layers import HeadNorm, LatentAttention, Linear, RMSNorm, RopeConfig, head_projections
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, count
from pace.llm.models.rope_config import read_rope, yarn_magnitude

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, independent of rms_norm_eps."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig(LlamaConfig):
    """A Llama whose keys and values are computed from latents. `head_dim` is derived from the others, as in
    `transformers`."""

    kv_lora_rank: int = count(512, MAX_HEAD_DIM)
    q_lora_rank: int | None = count(1536, optional=True)
    qk_nope_head_dim: int = count(128)
    qk_rope_head_dim: int = count(64, MAX_HEAD_DIM, minimum=2)
    v_head_dim: int | None = count(128)

    def check(self) -> None:
        heads = self.num_attention_heads
        if self.num_key_value_heads not in (None, heads):
            raise ValueError(
                "config.json: num_key_value_heads must be num_attention_heads with latent attention; got "
                f"{self.num_key_value_heads} and {heads}"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"config.json: qk_rope_head_dim must be even; got {self.qk_rope_head_dim}")
        if self.attention_bias and self.q_lora_rank is None:
            raise NotImplementedError("config.json: attention_bias without q_lora_rank is not implemented")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "head_dim": self.qk_rope_head_dim,
            "num_key_value_heads": self.num_attention_heads,
            "rope": self.read_rope(fields, self.qk_rope_head_dim),
        }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        rope = read_rope(fields, head_dim, self.max_position_embeddings, interleaved=self.rotates_neighbours)
        scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        if rope.kind not in ("default", "yarn") and scaling.get("mscale_all_dim"):
            raise NotImplementedError(f"config.json: mscale_all_dim with rope_type {rope.kind!r} is not implemented")
        return rope

    @property
    def rotates_neighbours(self) -> bool:
        """True if pairs of a rotation are adjacent elements, not halves."""
        return True

    @property
    def attention_scale(self) -> float:
        magnitude = yarn_magnitude(self.rope.factor, self.rope.mscale_all_dim)
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * magnitude**2


class LatentForCausalLM(LlamaForCausalLM):
    """Llama with latent attention."""

    def make_attention(self, name: str, index: int) -> LatentAttention:
        config, hidden, heads = self.config, self.config.hidden_size, self.config.num_attention_heads
        rank, rope_dim, nope_dim = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
        queries, kv = heads * (nope_dim + rope_dim), {f"{name}.kv_a_proj_with_mqa": rank + rope_dim}
        if config.q_lora_rank is None:
            down, query_norm, query_up = Linear({f"{name}.q_proj": queries} | kv, hidden), None, None
        else:
            down = Linear({f"{name}.q_a_proj": config.q_lora_rank} | kv, hidden, config.attention_bias)
            query_norm = RMSNorm(f"{name}.q_a_layernorm", config.q_lora_rank, LATENT_EPS)
            query_up = Linear({f"{name}.q_b_proj": queries}, config.q_lora_rank)
        return LatentAttention(
            down,
            query_norm,
            query_up,
            HeadNorm(f"{name}.kv_a_layernorm", rank, LATENT_EPS),
            *head_projections(name, heads, rank, nope_dim, config.v_head_dim),
            Linear({f"{name}.o_proj": hidden}, heads * config.v_head_dim, config.output_bias),
            nope_dim,
            Latent(rank, rope_dim),
            self.rotary(index),
            config.attention_scale,
        )
