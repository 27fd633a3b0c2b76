"""GPT-2: learned positions, LayerNorm before each part, and matrices stored transposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import Attention, Block, Embedding, LayerNorm, Linear, NoRotary, PlainMLP, TensorSource
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, flag, number, token_ids
from pace.ops.protocol import ForwardOps, Ops


@dataclass(frozen=True, kw_only=True)
class GPTNamesConfig(EqualHeadsConfig):
    """Fields of GPT-2 and GPT-J, under their names there."""

    n_inner: int | None = count(None, optional=True)
    activation_function: str = activation("gelu_new")
    layer_norm_epsilon: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(50256)
    eos_token_id: int | tuple[int, ...] | None = token_ids(50256)

    aliases: ClassVar[dict[str, str]] = {
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
    }
    also_read: ClassVar[frozenset[str]] = frozenset({"n_ctx"})

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"n_inner": self.n_inner or 4 * self.hidden_size}


@dataclass(frozen=True, kw_only=True)
class GPT2Config(GPTNamesConfig):
    vocab_size: int = count(50257)
    max_position_embeddings: int = count(1024, MAX_POSITIONS)
    hidden_size: int = count(768)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    scale_attn_weights: bool = flag(True)
    scale_attn_by_inverse_layer_idx: bool = flag(False)
    matrices_transposed: bool = flag(True)
    """False in GGUF files."""
    tie_word_embeddings: bool = flag(True)

    also_read: ClassVar[frozenset[str]] = GPTNamesConfig.also_read | {"reorder_and_upcast_attn"}

    def attention_scale(self, layer: int) -> float:
        """Factor of the scores."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


class GPT2LMHeadModel(BaseModelForCausalLM):
    Config = GPT2Config
    prefix = "transformer."
    embedding_name = "transformer.wte"
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, config: GPT2Config, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        hidden = config.hidden_size
        self.embedding = Embedding(self.embedding_name, config.vocab_size, hidden)
        self.positions = Embedding("transformer.wpe", config.max_position_embeddings, hidden)
        self.layers = [self.make_layer(f"transformer.h.{i}", i) for i in range(config.num_hidden_layers)]
        self.final_norm = LayerNorm("transformer.ln_f", hidden, config.layer_norm_epsilon)
        self.lm_head = self.make_head(hidden)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        return self.embedding(ops, batch.tokens) + self.positions(ops, batch.positions)

    def make_layer(self, name: str, index: int) -> Block:
        """Makes `x + attention(norm(x))`, then `x + mlp(norm(x))`."""
        config = self.config
        hidden, kv_heads, dim = config.hidden_size, config.num_key_value_heads, config.head_dim
        attention = Attention(
            self.make_qkv(f"{name}.attn.c_attn"),
            self.linear(f"{name}.attn.c_proj", hidden, hidden),
            config.num_attention_heads,
            Positions(kv_heads, dim, dim),
            NoRotary(),
            scale=config.attention_scale(index),
        )
        mlp = PlainMLP(
            self.linear(f"{name}.mlp.c_fc", config.n_inner, hidden),
            self.linear(f"{name}.mlp.c_proj", hidden, config.n_inner),
            config.activation_function,
        )
        first, second = (LayerNorm(f"{name}.ln_{i}", hidden, config.layer_norm_epsilon) for i in (1, 2))
        return Block(first, attention, second, mlp)

    def make_qkv(self, name: str) -> Linear:
        return self.linear(name, 3 * self.config.hidden_size, self.config.hidden_size)

    def linear(self, name: str, n: int, k: int) -> Linear:
        rows = TensorSource((k, n), transposed=True) if self.config.matrices_transposed else n
        return Linear({name: rows}, k, bias=True)
