"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel on one norm, biases everywhere, half of each head rotated.
Queries and keys may be normalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.batch import Positions
from pace.llm.layers import (
    Attention,
    Block,
    Embedding,
    LayerNorm,
    Linear,
    NoHeadNorm,
    PlainMLP,
    RopeConfig,
    Rotary,
    SharedHeadLayerNorm,
)
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.llama import LlamaConfig
from pace.llm.models.model_config import MAX_LAYERS, activation, count, flag, number
from pace.llm.models.rope_config import check_even, read_rope
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class PhiConfig(LlamaConfig):
    vocab_size: int = count(51200)
    hidden_size: int = count(2048)
    intermediate_size: int = count(8192)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    hidden_act: str = activation("gelu_new")
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)
    qk_layernorm: bool = flag(False)
    qkv_fused: bool = flag(False)
    """True if queries, keys and values are one tensor, as in old GGUF files."""

    only_here: ClassVar[dict[str, tuple]] = {
        "attention_bias": (True,),
        "mlp_bias": (True,),
    }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        rope = read_rope(fields, head_dim, self.max_position_embeddings, partial=True, default_partial=0.5)
        return check_even(rope, head_dim)


class PhiForCausalLM(BaseModelForCausalLM):
    Config = PhiConfig

    def __init__(self, config: PhiConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.rotaries = (Rotary(config.rope),)
        self.embedding = Embedding(self.embedding_name, config.vocab_size, config.hidden_size)
        self.layers = [
            phi_layer(config, f"model.layers.{i}", self.rotaries[0]) for i in range(config.num_hidden_layers)
        ]
        self.final_norm = LayerNorm("model.final_layernorm", config.hidden_size, config.layer_norm_eps)
        self.lm_head = self.make_head(config.hidden_size, bias=True)


def phi_layer(config: PhiConfig, name: str, rotary: Rotary) -> Block:
    """`x + attention(norm(x)) + mlp(norm(x))`."""
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    if config.qkv_fused:
        rows = {"qkv_proj": sum(rows.values())}
    attention = Attention(
        Linear({f"{name}.self_attn.{part}": count for part, count in rows.items()}, hidden, bias=True),
        Linear({f"{name}.self_attn.dense": hidden}, heads * dim, bias=True),
        heads,
        Positions(kv_heads, dim, dim),
        rotary,
        *(head_norm(config, f"{name}.self_attn.{part}_layernorm") for part in "qk"),
    )
    mlp = PlainMLP.named(
        f"{name}.mlp.fc1", f"{name}.mlp.fc2", hidden, config.intermediate_size, config.hidden_act, bias=True
    )
    norm = LayerNorm(f"{name}.input_layernorm", hidden, config.layer_norm_eps)
    return Block(norm, attention, None, mlp, parallel=True)


def head_norm(config: PhiConfig, name: str) -> SharedHeadLayerNorm | NoHeadNorm:
    return SharedHeadLayerNorm(name, config.head_dim, config.layer_norm_eps) if config.qk_layernorm else NoHeadNorm()
