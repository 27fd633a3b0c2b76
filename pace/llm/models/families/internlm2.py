"""InternLM 2 and 2.5: Llama with other names, and one tensor for queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import Attention, Linear, RowRange, TensorSource
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import count, flag, token_ids


@dataclass(frozen=True, kw_only=True)
class InternLM2Config(LlamaConfig):
    vocab_size: int = count(103168)
    attention_bias: bool = flag(True)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    aliases: ClassVar[dict[str, str]] = {"bias": "attention_bias"}
    only_here: ClassVar[dict[str, tuple]] = {**LlamaConfig.only_here, "mlp_bias": (False,)}


class InternLM2ForCausalLM(LlamaForCausalLM):
    Config = InternLM2Config
    other_names: ClassVar[dict[str, str]] = {
        r"^output\.": "lm_head.",
        r"^model\.tok_embeddings\.": "model.embed_tokens.",
        r"^(model\.layers\.\d+)\.attention\.wqkv\.": r"\1.self_attn.wqkv.",
        r"^(model\.layers\.\d+)\.attention\.wo\.": r"\1.self_attn.o_proj.",
        r"^(model\.layers\.\d+)\.feed_forward\.w1\.": r"\1.mlp.gate_proj.",
        r"^(model\.layers\.\d+)\.feed_forward\.w3\.": r"\1.mlp.up_proj.",
        r"^(model\.layers\.\d+)\.feed_forward\.w2\.": r"\1.mlp.down_proj.",
        r"^(model\.layers\.\d+)\.attention_norm\.": r"\1.input_layernorm.",
        r"^(model\.layers\.\d+)\.ffn_norm\.": r"\1.post_attention_layernorm.",
    }

    def make_attention(self, name: str, index: int) -> Attention:
        """The tensor has the rows of each key head together: its queries, its key, its value."""
        attention, config = super().make_attention(name, index), self.config
        kv_heads, dim, hidden = config.num_key_value_heads, config.head_dim, config.hidden_size
        queries = config.num_attention_heads // kv_heads * dim
        step = queries + 2 * dim
        ranges = {
            "q": RowRange(0, queries * kv_heads, queries, step),
            "k": RowRange(queries, dim * kv_heads, dim, step),
            "v": RowRange(queries + dim, dim * kv_heads, dim, step),
        }
        tensor = f"{name}.wqkv"
        sources = {
            f"{name}.{part}_proj": TensorSource(
                (step * kv_heads, hidden), (rows,), f"{tensor}.weight", f"{tensor}.bias"
            )
            for part, rows in ranges.items()
        }
        attention.qkv = Linear(sources, hidden, config.qkv_bias)
        return attention
