"""BitNet b1.58: Llama with a norm before the last product of each branch, and squared ReLU in its gated MLP.

Weights of three levels, and inputs in int8 with one scale for each token, are the checkpoint's `quantization_config`
(pace/checkpoints/quantized/bitnet.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Attention, GatedMLP, NormedLinear, RMSNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, check_divides, count, number, token_ids


@dataclass(frozen=True, kw_only=True)
class BitNetConfig(LlamaConfig):
    vocab_size: int = count(128256)
    hidden_size: int = count(2560)
    intermediate_size: int = count(6912)
    num_hidden_layers: int = count(30, MAX_LAYERS)
    num_attention_heads: int = count(20)
    num_key_value_heads: int | None = count(5, optional=True)
    hidden_act: str = activation("relu2")
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    bos_token_id: int | tuple[int, ...] | None = token_ids(128000)
    eos_token_id: int | tuple[int, ...] | None = token_ids(128001)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 5e5}

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "hidden_size")
        if self.head_dim not in (None, self.hidden_size // self.num_attention_heads):
            raise ValueError(
                f"config.json: head_dim must be hidden_size / num_attention_heads = "
                f"{self.hidden_size // self.num_attention_heads}, the width of attn_sub_norm; got {self.head_dim}"
            )


class BitNetForCausalLM(LlamaForCausalLM):
    Config = BitNetConfig

    def make_attention(self, name: str, index: int) -> Attention:
        attention, hidden = super().make_attention(name, index), self.config.hidden_size
        norm = self.make_norm(f"{name}.attn_sub_norm")
        attention.output = NormedLinear(norm, {f"{name}.o_proj": hidden}, hidden, self.config.output_bias)
        return attention

    def make_mlp(self, name: str) -> GatedMLP:
        mlp, config = super().make_mlp(name), self.config
        norm = RMSNorm(f"{name}.ffn_sub_norm", config.intermediate_size, config.rms_norm_eps)
        mlp.down = NormedLinear(norm, {f"{name}.down_proj": config.hidden_size}, config.intermediate_size)
        return mlp
