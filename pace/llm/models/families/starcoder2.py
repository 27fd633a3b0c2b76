"""StarCoder2: Llama with LayerNorm, biases, a plain MLP and a sliding window over all layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pace.llm.layers import LayerNorm, PlainMLP, RopeConfig
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, flag, number, token_ids
from pace.llm.models.rope_config import read_rope

logger = logging.getLogger("pace")


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(LlamaConfig):
    vocab_size: int = count(49152)
    hidden_size: int = count(3072)
    intermediate_size: int = count(12288)
    num_hidden_layers: int = count(30, MAX_LAYERS)
    num_attention_heads: int = count(24)
    num_key_value_heads: int | None = count(2)
    hidden_act: str = activation("gelu_tanh")
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    norm_epsilon: float = number(1e-5, 0.0, 1.0)
    use_bias: bool = flag(True)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(50256)
    eos_token_id: int | tuple[int, ...] | None = token_ids(50256)

    without_effect: ClassVar[dict[str, tuple]] = {
        "attention_bias": (True,),
        "mlp_bias": (True,),
        "norm_type": ("layer_norm",),
        "mlp_type": ("default",),
        "activation_function": (None, "gelu"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
    }
    """In the 3B, `activation_function` is present but `hidden_act` is used."""
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
    }

    @property
    def qkv_bias(self) -> bool:
        return self.use_bias

    @property
    def output_bias(self) -> bool:
        return self.use_bias

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        rope = read_rope(fields, head_dim, self.max_position_embeddings, partial=True)
        if rope.dim == head_dim:
            return rope
        if rope.kind != "default":
            raise NotImplementedError(
                f"config.json: partial_rotary_factor with rope_type = {rope.kind!r} is not implemented for Starcoder2"
            )
        logger.warning("config.json: partial_rotary_factor is ignored, as transformers does: all of a head is rotated")
        return replace(rope, dim=head_dim)

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Starcoder2ForCausalLM(LlamaForCausalLM):
    Config = Starcoder2Config

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.norm_epsilon)

    def make_mlp(self, name: str) -> PlainMLP:
        config = self.config
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.use_bias
        return PlainMLP.named(f"{name}.c_fc", f"{name}.c_proj", hidden, inner, config.hidden_act, bias=bias)
