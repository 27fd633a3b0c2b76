"""BLOOM, 560m to 176b, and BLOOMZ: positions by ALiBi, a LayerNorm after the embedding and before each part. The rows
of queries, keys and values are stored head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import Attention, Block, Embedding, LayerNorm, Linear, NoRotary, PlainMLP, alibi_slopes
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.families.gpt_neox import qkv_by_group
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.ops.protocol import ForwardOps, Ops


@dataclass(frozen=True, kw_only=True)
class BloomConfig(EqualHeadsConfig):
    vocab_size: int = count(250880)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    """Length of the texts of the training; transformers has no limit."""
    hidden_size: int = count(64)
    num_hidden_layers: int = count(2, MAX_LAYERS)
    num_attention_heads: int = count(8)
    layer_norm_epsilon: float = number(1e-5, 0.0, 1.0)
    apply_residual_connection_post_layernorm: bool = flag(False)
    qkv_by_head: bool = flag(True)
    """False in GGUF files, where all queries come first."""
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(1)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)

    aliases: ClassVar[dict[str, str]] = {
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
    }
    without_effect: ClassVar[dict[str, tuple]] = {"n_inner": (None,)}
    also_read: ClassVar[frozenset[str]] = frozenset(
        """slow_but_exact attention_softmax_in_fp32 masked_softmax_fusion bias_dropout_fusion skip_bias_add
        skip_bias_add_qkv offset_alibi""".split()
    )


class BloomForCausalLM(BaseModelForCausalLM):
    Config = BloomConfig
    prefix = "transformer."
    embedding_name = "transformer.word_embeddings"

    def __init__(self, config: BloomConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        hidden = config.hidden_size
        self.embedding = Embedding(self.embedding_name, config.vocab_size, hidden)
        self.embedding_norm = LayerNorm("transformer.word_embeddings_layernorm", hidden, config.layer_norm_epsilon)
        self.layers = [bloom_layer(config, f"transformer.h.{i}") for i in range(config.num_hidden_layers)]
        self.final_norm = LayerNorm("transformer.ln_f", hidden, config.layer_norm_epsilon)
        self.lm_head = self.make_head(hidden)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        return self.embedding_norm(ops, super().embed(ops, batch))


def bloom_layer(config: BloomConfig, name: str) -> Block:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the norms may also replace x in the sums."""
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    rows = qkv_by_group(hidden, heads, heads, dim) if config.qkv_by_head else 3 * hidden
    attention = Attention(
        Linear({f"{name}.self_attention.query_key_value": rows}, hidden, bias=True),
        Linear({f"{name}.self_attention.dense": hidden}, hidden, bias=True),
        heads,
        Positions(heads, dim, dim),
        NoRotary(),
        slopes=alibi_slopes(heads),
    )
    mlp = PlainMLP.named(
        f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h", hidden, 4 * hidden, "gelu_tanh", bias=True
    )
    first, second = (
        LayerNorm(f"{name}.{which}_layernorm", hidden, config.layer_norm_epsilon)
        for which in ("input", "post_attention")
    )
    return Block(first, attention, second, mlp, adds_to_norms=config.apply_residual_connection_post_layernorm)
