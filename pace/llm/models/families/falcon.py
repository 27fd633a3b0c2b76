"""Falcon: 7B (one key head for all queries), 40B, 180B and Falcon 2 11B (`new_decoder_architecture`), and Falcon-RW
(ALiBi). Attention and MLP are usually parallel, on one LayerNorm or on two."""

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
    NoRotary,
    PlainMLP,
    RopeConfig,
    Rotary,
    alibi_slopes,
)
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.families.gpt_neox import qkv_by_group
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.llm.models.model_config import activation as named_activation
from pace.llm.models.rope_config import ROPE_FIELDS, check_even, longest_sequence, read_rope
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class FalconConfig(EqualHeadsConfig):
    vocab_size: int = count(65024)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    hidden_size: int = count(4544)
    num_hidden_layers: int = count(32, MAX_LAYERS)
    num_attention_heads: int = count(71)
    num_kv_heads: int | None = count(None, optional=True)
    """Number of key heads in the new architecture; null for one for each query head."""
    ffn_hidden_size: int | None = count(None, optional=True)
    layer_norm_epsilon: float = number(1e-5, 0.0, 1.0)
    activation: str = named_activation("gelu")
    alibi: bool = flag(False)
    bias: bool = flag(False)
    multi_query: bool = flag(True)
    new_decoder_architecture: bool = flag(False)
    num_ln_in_parallel_attn: int | None = count(None, 2, optional=True)
    parallel_attn: bool = flag(True)
    qkv_by_group: bool = flag(True)
    """False in GGUF files, where all queries come first."""
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(11)
    eos_token_id: int | tuple[int, ...] | None = token_ids(11)
    rope: RopeConfig | None = None

    aliases: ClassVar[dict[str, str]] = {
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "n_layer": "num_hidden_layers",
    }
    without_effect: ClassVar[dict[str, tuple]] = {"apply_residual_connection_post_layernorm": (False,)}
    also_read: ClassVar[frozenset[str]] = frozenset(ROPE_FIELDS)

    def check(self) -> None:
        super().check()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config.json: num_attention_heads must be a multiple of num_kv_heads; got {self.num_attention_heads}"
                f" and {self.num_key_value_heads}"
            )
        if self.new_decoder_architecture and not self.parallel_attn:
            raise ValueError("config.json: parallel_attn must be true with new_decoder_architecture; got false")
        if self.num_ln_in_parallel_attn == 2 and not self.new_decoder_architecture:
            raise ValueError("config.json: num_ln_in_parallel_attn = 2 needs new_decoder_architecture = true")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "ffn_hidden_size": self.ffn_hidden_size or 4 * self.hidden_size,
            "num_kv_heads": self.num_kv_heads or self.num_attention_heads,
        }
        if not self.alibi:
            rope = read_rope(fields, self.head_dim, self.max_position_embeddings)
            found["rope"] = check_even(rope, self.head_dim)
        return found

    @property
    def max_length(self) -> int:
        return longest_sequence(self.rope) if self.rope else self.max_position_embeddings

    @property
    def num_key_value_heads(self) -> int:
        if self.new_decoder_architecture:
            return self.num_kv_heads or self.num_attention_heads
        return 1 if self.multi_query else self.num_attention_heads


class FalconForCausalLM(BaseModelForCausalLM):
    Config = FalconConfig
    prefix = "transformer."
    embedding_name = "transformer.word_embeddings"

    def __init__(self, config: FalconConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.rotaries = (Rotary(config.rope),) if config.rope else ()
        self.embedding = Embedding(self.embedding_name, config.vocab_size, config.hidden_size)
        self.layers = [self.make_layer(f"transformer.h.{i}") for i in range(config.num_hidden_layers)]
        self.final_norm = self.make_norm("transformer.ln_f")
        self.lm_head = self.make_head(config.hidden_size)

    def make_layer(self, name: str) -> Block:
        """Makes `x + attention(norm(x)) + mlp(norm(x))`, with one norm or two; not in parallel, the MLP reads a norm of
        the first sum."""
        config = self.config
        attention, mlp = self.make_attention(f"{name}.self_attention"), self.make_mlp(f"{name}.mlp")
        if config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1:
            norms = (self.make_norm(f"{name}.ln_{branch}") for branch in ("attn", "mlp"))
            return Block(next(norms), attention, next(norms), mlp, parallel=True)
        norm = self.make_norm(f"{name}.input_layernorm")
        if config.parallel_attn:
            return Block(norm, attention, None, mlp, parallel=True)
        return Block(norm, attention, self.make_norm(f"{name}.post_attention_layernorm"), mlp)

    def make_attention(self, name: str) -> Attention:
        config = self.config
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = qkv_by_group(hidden, heads, kv_heads, dim) if config.qkv_by_group else (heads + 2 * kv_heads) * dim
        # transformers rounds slopes, positions and biases to bf16.
        slopes = alibi_slopes(heads).bfloat16().float() if config.alibi else None
        return Attention(
            Linear({f"{name}.query_key_value": rows}, hidden, config.bias),
            Linear({f"{name}.dense": hidden}, hidden, config.bias),
            heads,
            Positions(kv_heads, dim, dim),
            self.rotaries[0] if self.rotaries else NoRotary(),
            slopes=slopes,
            bf16_bias=config.alibi,
        )

    def make_mlp(self, name: str) -> PlainMLP:
        config = self.config
        hidden, inner = config.hidden_size, config.ffn_hidden_size
        return PlainMLP.named(
            f"{name}.dense_h_to_4h", f"{name}.dense_4h_to_h", hidden, inner, config.activation, bias=config.bias
        )

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.layer_norm_epsilon)
