"""GPT-NeoX and Pythia: attention and MLP in parallel, each with its own norm, and a quarter of each head rotated. The
rows of queries, keys and values are stored head by head."""

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
    PlainMLP,
    RopeConfig,
    Rotary,
    RowRange,
    TensorSource,
)
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, flag, number, token_ids
from pace.llm.models.rope_config import ROPE_FIELDS, check_even, longest_sequence, read_rope
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(EqualHeadsConfig):
    vocab_size: int = count(50432)
    hidden_size: int = count(6144)
    intermediate_size: int = count(24576)
    num_hidden_layers: int = count(44, MAX_LAYERS)
    num_attention_heads: int = count(64)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    hidden_act: str = activation("gelu")
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)
    use_parallel_residual: bool = flag(True)
    attention_bias: bool = flag(True)
    qkv_by_head: bool = flag(True)
    """True if the rows of queries, keys and values are stored head by head; in GGUF files all queries come first."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)
    rope: RopeConfig | None = None

    aliases: ClassVar[dict[str, str]] = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    also_read: ClassVar[frozenset[str]] = frozenset(ROPE_FIELDS)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        rope = read_rope(fields, self.head_dim, self.max_position_embeddings, partial=True, default_partial=0.25)
        return {"rope": check_even(rope, self.head_dim)}

    @property
    def max_length(self) -> int:
        return longest_sequence(self.rope)


class GPTNeoXForCausalLM(BaseModelForCausalLM):
    Config = GPTNeoXConfig
    prefix = "gpt_neox."
    embedding_name = "gpt_neox.embed_in"
    text_prefixes: ClassVar[dict[str, str]] = {"embed_out.": "lm_head."}
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    )

    def __init__(self, config: GPTNeoXConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.rotaries = (Rotary(config.rope),)
        self.embedding = Embedding(self.embedding_name, config.vocab_size, config.hidden_size)
        self.layers = [
            gpt_neox_layer(config, f"gpt_neox.layers.{i}", self.rotaries[0]) for i in range(config.num_hidden_layers)
        ]
        self.final_norm = LayerNorm("gpt_neox.final_layer_norm", config.hidden_size, config.layer_norm_eps)
        self.lm_head = self.make_head(config.hidden_size)


def gpt_neox_layer(config: GPTNeoXConfig, name: str, rotary: Rotary) -> Block:
    """`x + attention(norm(x)) + mlp(other_norm(x))`; if not parallel, the MLP reads a norm of the first sum."""
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    rows = qkv_by_group(hidden, heads, heads, dim) if config.qkv_by_head else 3 * hidden
    attention = Attention(
        Linear({f"{name}.attention.query_key_value": rows}, hidden, config.attention_bias),
        Linear({f"{name}.attention.dense": hidden}, hidden, config.attention_bias),
        heads,
        Positions(heads, dim, dim),
        rotary,
    )
    up, down = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
    mlp = PlainMLP.named(up, down, hidden, config.intermediate_size, config.hidden_act, bias=True)
    norm, other_norm = (
        LayerNorm(f"{name}.{which}_layernorm", hidden, config.layer_norm_eps) for which in ("input", "post_attention")
    )
    return Block(norm, attention, other_norm, mlp, parallel=config.use_parallel_residual)


def qkv_by_group(hidden: int, num_heads: int, kv_heads: int, head_dim: int) -> TensorSource:
    """Locates queries, keys and values in a tensor. For each key head, it has the rows of its queries, of the key and
    of the value."""
    queries = num_heads // kv_heads * head_dim
    step = queries + 2 * head_dim
    rows = (
        RowRange(0, num_heads * head_dim, queries, step),
        *(RowRange(queries + part * head_dim, kv_heads * head_dim, head_dim, step) for part in range(2)),
    )
    return TensorSource((kv_heads * step, hidden), rows)
