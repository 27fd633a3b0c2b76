"""Qwen3-Next (80B-A3B, Coder-Next): the gated delta rule in three of four layers, gated attention in the fourth, and a
mixture of experts in each."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.layers import FloatLinear, Linear, RowRange, TensorSource
from pace.llm.models.families.delta_rule import GatedDeltaConfig, GatedDeltaForCausalLM
from pace.llm.models.families.qwen2_moe import Qwen2MoeForCausalLM, QwenMixtureConfig
from pace.llm.models.model_config import MAX_LAYERS, count, flag
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(QwenMixtureConfig, GatedDeltaConfig):
    vocab_size: int = count(151936)
    hidden_size: int = count(2048)
    intermediate_size: int = count(5632)
    num_hidden_layers: int = count(48, MAX_LAYERS)
    num_experts: int = count(512, MAX_EXPERTS)
    num_experts_per_tok: int = count(10, MAX_EXPERTS)
    moe_intermediate_size: int = count(512)
    shared_expert_intermediate_size: int = count(512)
    norm_topk_prob: bool = flag(True)
    qkvz_by_head: bool = flag(True)
    """True if the rows of queries, keys, values and gates are stored key head by key head. GGUF files have in_proj_qkv
    and in_proj_z, as in Qwen3.5."""


class Qwen3NextForCausalLM(GatedDeltaForCausalLM, Qwen2MoeForCausalLM):
    Config = Qwen3NextConfig

    def make_inputs(self, name: str) -> Linear:
        """The rows of in_proj_qkvz are, for each key head, its query and key, then the values and gates of the value
        heads that read it."""
        if not self.config.qkvz_by_head:
            return super().make_inputs(name)
        config, tensor = self.config, f"{name}.in_proj_qkvz.weight"
        keys, heads = config.linear_key_head_dim, config.linear_num_key_heads
        values = config.values_width // heads
        step = 2 * (keys + values)

        def part(first: int, run: int) -> TensorSource:
            return TensorSource((heads * step, config.hidden_size), (RowRange(first, heads * run, run, step),), tensor)

        parts = {
            f"{name}.in_proj_q": part(0, keys),
            f"{name}.in_proj_k": part(keys, keys),
            f"{name}.in_proj_v": part(2 * keys, values),
            f"{name}.in_proj_z": part(2 * keys + values, values),
        }
        return Linear(parts, config.hidden_size)

    def make_steps(self, name: str) -> FloatLinear:
        """The rows of in_proj_ba are, for each key head, beta and the steps of the value heads that read it."""
        config, tensor = self.config, f"{name}.in_proj_ba.weight"
        count = config.linear_num_value_heads
        run = count // config.linear_num_key_heads

        def part(first: int) -> TensorSource:
            return TensorSource((2 * count, config.hidden_size), (RowRange(first, count, run, 2 * run),), tensor)

        return FloatLinear({f"{name}.in_proj_b": part(0), f"{name}.in_proj_a": part(run)}, config.hidden_size)
