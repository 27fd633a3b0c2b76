"""Persimmon 8B: LayerNorms, also of query and key heads, an MLP without a gate, and half of each head rotated. The rows
of queries, keys and values are stored head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Attention, LayerNorm, Linear, NoHeadNorm, RopeConfig, SharedHeadLayerNorm
from pace.llm.models.families.gpt_neox import qkv_by_group
from pace.llm.models.families.llama import LlamaConfig
from pace.llm.models.families.ungated import UngatedForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, flag, number
from pace.llm.models.rope_config import check_even, read_rope


@dataclass(frozen=True, kw_only=True)
class PersimmonConfig(LlamaConfig):
    vocab_size: int = count(262144)
    intermediate_size: int = count(16384)
    num_hidden_layers: int = count(36, MAX_LAYERS)
    num_attention_heads: int = count(64)
    max_position_embeddings: int = count(16384, MAX_POSITIONS)
    hidden_act: str = activation("relu2")
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)
    qk_layernorm: bool = flag(True)
    attention_bias: bool = flag(True)
    mlp_bias: bool = flag(True)

    without_effect: ClassVar[dict[str, tuple]] = {
        "attention_bias": (True,),
        "head_dim": (None,),
        "mlp_bias": (True,),
        "num_key_value_heads": (None,),
    }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        rope = read_rope(fields, head_dim, self.max_position_embeddings, partial=True, default_partial=0.5)
        return check_even(rope, head_dim)


class PersimmonForCausalLM(UngatedForCausalLM):
    Config = PersimmonConfig
    mlp_names = ("dense_h_to_4h", "dense_4h_to_h")
    qkv_names = ("query_key_value",)
    head_norm_names = ("q_layernorm", "k_layernorm")
    other_names: ClassVar[dict[str, str]] = {
        r"^model\.final_layernorm\.": "model.norm.",
        r"\.self_attn\.dense\.": ".self_attn.o_proj.",
    }

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.layer_norm_eps)

    def make_attention(self, name: str, index: int) -> Attention:
        config, attention = self.config, super().make_attention(name, index)
        rows = qkv_by_group(config.hidden_size, config.num_attention_heads, config.num_attention_heads, config.head_dim)
        attention.qkv = Linear({f"{name}.query_key_value": rows}, config.hidden_size, bias=True)
        return attention

    def make_head_norm(self, name: str, num_heads: int) -> SharedHeadLayerNorm | NoHeadNorm:
        config = self.config
        if not config.qk_layernorm:
            return NoHeadNorm()
        return SharedHeadLayerNorm(name, config.head_dim, config.layer_norm_eps)
