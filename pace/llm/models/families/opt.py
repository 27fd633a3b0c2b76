"""OPT, 125m to 175B: learned positions, and LayerNorm before each part. The 350m has it after each part, and two
projections around the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import Attention, Block, Embedding, Layer, LayerNorm, Linear, NoNorm, NoRotary, PlainMLP
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.model_config import MAX_LAYERS, activation, count, flag, token_ids
from pace.ops.protocol import ForwardOps, Ops

POSITION_OFFSET = 2
"""Row of the position embedding for position 0: fairseq's table has two rows for padding."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(EqualHeadsConfig):
    vocab_size: int = count(50272)
    hidden_size: int = count(768)
    ffn_dim: int = count(3072)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    word_embed_proj_dim: int | None = count(None, optional=True)
    activation_function: str = activation("relu")
    do_layer_norm_before: bool = flag(True)
    _remove_final_layer_norm: bool = flag(False)
    enable_bias: bool = flag(True)
    layer_norm_elementwise_affine: bool = flag(True)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(2)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"word_embed_proj_dim": self.word_embed_proj_dim or self.hidden_size}


class OPTForCausalLM(BaseModelForCausalLM):
    Config = OPTConfig
    embedding_name = "model.decoder.embed_tokens"
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"model\.decoder\.version",)

    def __init__(self, config: OPTConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        hidden, narrow = config.hidden_size, config.word_embed_proj_dim
        self.embedding = Embedding(self.embedding_name, config.vocab_size, narrow)
        self.positions = Embedding(
            "model.decoder.embed_positions", config.max_position_embeddings + POSITION_OFFSET, hidden
        )
        self.project_in: Linear | NoProjection = NoProjection()
        self.project_out: Linear | NoProjection = NoProjection()
        if narrow != hidden:
            self.project_in = Linear({"model.decoder.project_in": hidden}, narrow)
            self.project_out = Linear({"model.decoder.project_out": narrow}, hidden)
        self.layers = [opt_layer(config, f"model.decoder.layers.{i}") for i in range(config.num_hidden_layers)]
        self.final_norm: LayerNorm | NoNorm = NoNorm()
        if config.do_layer_norm_before and not config._remove_final_layer_norm:
            self.final_norm = opt_norm(config, "model.decoder.final_layer_norm")
        self.lm_head = self.make_head(narrow)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        positions = self.positions(ops, batch.positions + POSITION_OFFSET)
        return self.project_in(ops, self.embedding(ops, batch.tokens), residual=positions)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def row_size(self) -> int:
        return self.config.word_embed_proj_dim

    def final_rows(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.project_out(ops, super().final_rows(ops, batch, angles))


class NoProjection(Layer):
    """Null object if embeddings are as wide as the model: `x + residual`."""

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else x + residual


def opt_layer(config: OPTConfig, name: str) -> Block:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; or `norm(x + attention(x))`, then `norm(x + mlp(x))`."""
    hidden, heads, dim, bias = config.hidden_size, config.num_attention_heads, config.head_dim, config.enable_bias
    attention = Attention(
        Linear({f"{name}.self_attn.{part}_proj": hidden for part in "qkv"}, hidden, bias),
        Linear({f"{name}.self_attn.out_proj": hidden}, hidden, bias),
        heads,
        Positions(heads, dim, dim),
        NoRotary(),
    )
    mlp = PlainMLP.named(f"{name}.fc1", f"{name}.fc2", hidden, config.ffn_dim, config.activation_function, bias=bias)
    first, second = (opt_norm(config, f"{name}.{norm}") for norm in ("self_attn_layer_norm", "final_layer_norm"))
    if config.do_layer_norm_before:
        return Block(first, attention, second, mlp)
    return Block(NoNorm(), attention, NoNorm(), mlp, mixer_post_norm=first, mlp_post_norm=second, norms_sum=True)


def opt_norm(config: OPTConfig, name: str) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, eps=1e-5, affine=config.layer_norm_elementwise_affine)
