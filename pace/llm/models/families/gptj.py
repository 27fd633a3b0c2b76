"""GPT-J: attention and MLP in parallel on one norm, adjacent pairs rotated in part of each head, an LM head with a
bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pace.batch import Positions
from pace.llm.layers import Attention, Block, Embedding, LayerNorm, Linear, PlainMLP, RopeConfig, Rotary
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.gpt2 import GPTNamesConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(GPTNamesConfig):
    vocab_size: int = count(50400)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    hidden_size: int = count(4096)
    num_hidden_layers: int = count(28, MAX_LAYERS)
    num_attention_heads: int = count(16)
    rotary_dim: int = count(64, minimum=2)

    only_here: ClassVar[dict[str, tuple]] = {"rotary": (True,), "rope_scaling": (None,), "scale_attn_weights": (True,)}

    def check(self) -> None:
        super().check()
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"config.json: rotary_dim must be even and at most n_embd / n_head = {self.head_dim}; got "
                f"{self.rotary_dim}"
            )

    @property
    def rope(self) -> RopeConfig:
        return RopeConfig("default", 10000.0, self.rotary_dim, self.max_position_embeddings, interleaved=True)


class GPTJForCausalLM(BaseModelForCausalLM):
    Config = GPTJConfig
    prefix = "transformer."
    embedding_name = "transformer.wte"
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",)

    def __init__(self, config: GPTJConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.rotaries = (Rotary(config.rope),)
        self.embedding = Embedding(self.embedding_name, config.vocab_size, config.hidden_size)
        self.layers = [self.make_layer(f"transformer.h.{i}") for i in range(config.num_hidden_layers)]
        self.final_norm = LayerNorm("transformer.ln_f", config.hidden_size, config.layer_norm_epsilon)
        self.lm_head = self.make_head(config.hidden_size, bias=True)

    def make_layer(self, name: str) -> Block:
        """Makes `x + attention(norm(x)) + mlp(norm(x))`."""
        config = self.config
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        attention = Attention(
            self.make_qkv(f"{name}.attn"),
            Linear({f"{name}.attn.out_proj": hidden}, hidden),
            heads,
            Positions(heads, dim, dim),
            self.rotaries[0],
        )
        mlp = PlainMLP.named(
            f"{name}.mlp.fc_in", f"{name}.mlp.fc_out", hidden, config.n_inner, config.activation_function, bias=True
        )
        norm = LayerNorm(f"{name}.ln_1", hidden, config.layer_norm_epsilon)
        return Block(norm, attention, None, mlp, parallel=True)

    def make_qkv(self, name: str) -> Linear:
        hidden = self.config.hidden_size
        return Linear({f"{name}.{part}_proj": hidden for part in "qkv"}, hidden)
