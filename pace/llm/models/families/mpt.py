"""MPT 7B and 30B: positions by ALiBi, and no biases, in LayerNorms either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.batch import Positions
from pace.llm.layers import Attention, Block, Embedding, LayerNorm, Linear, NoRotary, PlainMLP, alibi_slopes
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.model_config import HARMLESS, MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.naming import shown
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class MptConfig(EqualHeadsConfig):
    """The fields of `attn_config` are read as if they were at the top."""

    vocab_size: int = count(50368)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    hidden_size: int = count(2048)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(16)
    layer_norm_epsilon: float = number(1e-5, 0.0, 1.0)
    clip_qkv: float | None = number(None, 0.0, 1e30, optional=True)
    """0 and null are no limit."""
    softmax_scale: float | None = number(None, 0.0, 1e6, optional=True)
    alibi_bias_max: float = number(8.0, 0.0, 1e3)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    aliases: ClassVar[dict[str, str]] = {
        "max_seq_len": "max_position_embeddings",
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
    }
    only_here: ClassVar[dict[str, tuple]] = {
        "alibi": (True,),
        "attn_type": ("multihead_attention",),
        "attn_uses_sequence_id": (False,),
        "expansion_ratio": (4,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "prefix_lm": (False,),
        "qk_gn": (False,),
        "qk_ln": (False,),
        "rope": (False,),
        "sliding_window_size": (-1,),
    }
    also_read: ClassVar[frozenset[str]] = frozenset(
        {"attn_impl", "embedding_fraction", "init_config", "init_device", "learned_pos_emb", "verbose"}
    )
    """`learned_pos_emb` has no effect next to ALiBi."""

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        fields = dict(raw)
        attention = fields.pop("attn_config", None) or {}
        if not isinstance(attention, dict):
            raise ValueError(f"config.json: attn_config must be an object or null; got {shown(attention)}")
        return {name: value for name, value in attention.items() if not HARMLESS.fullmatch(name)} | fields


class MptForCausalLM(BaseModelForCausalLM):
    Config = MptConfig
    prefix = "transformer."
    embedding_name = "transformer.wte"

    def __init__(self, config: MptConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.embedding = Embedding(self.embedding_name, config.vocab_size, config.hidden_size)
        self.layers = [mpt_layer(config, f"transformer.blocks.{i}") for i in range(config.num_hidden_layers)]
        self.final_norm = mpt_norm(config, "transformer.norm_f")
        self.lm_head = self.make_head(config.hidden_size)


def mpt_layer(config: MptConfig, name: str) -> Block:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    attention = Attention(
        Linear({f"{name}.attn.Wqkv": 3 * hidden}, hidden),
        Linear({f"{name}.attn.out_proj": hidden}, hidden),
        heads,
        Positions(heads, dim, dim),
        NoRotary(),
        scale=config.softmax_scale,
        clip=config.clip_qkv or None,
        slopes=alibi_slopes(heads, config.alibi_bias_max),
    )
    mlp = PlainMLP.named(f"{name}.ffn.up_proj", f"{name}.ffn.down_proj", hidden, 4 * hidden, "gelu")
    return Block(mpt_norm(config, f"{name}.norm_1"), attention, mpt_norm(config, f"{name}.norm_2"), mlp)


def mpt_norm(config: MptConfig, name: str) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, config.layer_norm_epsilon, bias=False)
