"""ChatGLM2 and 3, and GLM-4-9B as first published, with the `chatglm` code in their checkpoints. Adjacent pairs are
rotated in half of each head. Queries, keys and values are one tensor, and so are gate and up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pace.batch import Positions
from pace.llm.layers import Attention, Block, Embedding, GatedLinear, GatedMLP, Linear, RMSNorm, RopeConfig, Rotary
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    ModelConfig,
    check_divides,
    count,
    flag,
    number,
    token_ids,
)
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class ChatGLMConfig(ModelConfig):
    vocab_size: int = count(65024)
    hidden_size: int = count(4096)
    intermediate_size: int = count(13696)
    num_hidden_layers: int = count(28, MAX_LAYERS)
    num_attention_heads: int = count(32)
    head_dim: int = count(128, MAX_HEAD_DIM, minimum=4)
    multi_query_attention: bool = flag(False)
    multi_query_group_num: int = count(1)
    add_qkv_bias: bool = flag(False)
    add_bias_linear: bool = flag(False)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    rope_ratio: float = number(1.0, 1e-3, 1e9)
    original_rope: bool = flag(True)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    aliases: ClassVar[dict[str, str]] = {
        "padded_vocab_size": "vocab_size",
        "ffn_hidden_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "kv_channels": "head_dim",
        "seq_length": "max_position_embeddings",
        "layernorm_epsilon": "rms_norm_eps",
    }
    only_here: ClassVar[dict[str, tuple]] = {
        "rmsnorm": (True,),
        "rope_scaling": (None,),
        "post_layer_norm": (True,),
        "apply_residual_connection_post_layernorm": (False,),
        "pre_seq_len": (None, 0),
        "prefix_projection": (False,),
        "quantization_bit": (None, 0),
    }
    also_read: ClassVar[frozenset[str]] = frozenset(
        {
            "apply_query_key_layer_scaling",  # divides and multiplies the scores by the same number
            "attention_softmax_in_fp32",
            "fp32_residual_connection",
            "bias_dropout_fusion",
        }
    )

    def check(self) -> None:
        check_divides(self, "num_key_value_heads", "num_attention_heads")
        if not self.multi_query_attention:
            raise NotImplementedError(
                "config.json: multi_query_attention = false, also where it is missing, is not implemented for ChatGLM;"
                " implemented: true"
            )
        if self.head_dim % 4:
            raise ValueError(f"config.json: kv_channels must be a multiple of 4; got {self.head_dim}")

    @property
    def num_key_value_heads(self) -> int:
        return self.multi_query_group_num

    @property
    def rope(self) -> RopeConfig:
        return RopeConfig(
            "default",
            10000.0 * self.rope_ratio,
            self.head_dim // 2,
            self.max_position_embeddings,
            interleaved=self.original_rope,
        )


class ChatGLMForConditionalGeneration(BaseModelForCausalLM):
    Config = ChatGLMConfig
    prefix = "transformer."
    embedding_name = "transformer.embedding.word_embeddings"
    text_prefixes: ClassVar[dict[str, str]] = {"transformer.output_layer.": "lm_head."}
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"transformer\.rotary_pos_emb\.inv_freq",)

    def __init__(self, config: ChatGLMConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.rotaries = (Rotary(config.rope),)
        self.embedding = Embedding(self.embedding_name, config.vocab_size, config.hidden_size)
        self.layers = [
            chatglm_layer(config, f"transformer.encoder.layers.{i}", self.rotaries[0])
            for i in range(config.num_hidden_layers)
        ]
        self.final_norm = RMSNorm("transformer.encoder.final_layernorm", config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.make_head(config.hidden_size)


def chatglm_layer(config: ChatGLMConfig, name: str, rotary: Rotary) -> Block:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    bias, qkv_bias = config.add_bias_linear, config.add_bias_linear or config.add_qkv_bias
    attention = Attention(
        Linear({f"{name}.self_attention.query_key_value": (heads + 2 * kv_heads) * dim}, hidden, qkv_bias),
        Linear({f"{name}.self_attention.dense": hidden}, heads * dim, bias),
        heads,
        Positions(kv_heads, dim, dim),
        rotary,
    )
    mlp = GatedMLP(
        GatedLinear({f"{name}.mlp.dense_h_to_4h": 2 * inner}, hidden, bias),
        Linear({f"{name}.mlp.dense_4h_to_h": hidden}, inner, bias),
        "silu",
    )
    first, second = (
        RMSNorm(f"{name}.{norm}", hidden, config.rms_norm_eps)
        for norm in ("input_layernorm", "post_attention_layernorm")
    )
    return Block(first, attention, second, mlp)
