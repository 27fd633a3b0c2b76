"""LFM2 and LFM2.5: gated convolutions in most layers, attention in the others. A convolution keeps its last inputs in
place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Convolution, Linear, Mixer, ShortConvolution
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixture_config import layer_numbers
from pace.llm.models.layer_types import CONVOLUTION, FULL, check_layer_types, layer_types
from pace.llm.models.model_config import MAX_KERNEL, MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(LlamaConfig):
    """Fields that the dense models and the mixtures have in common."""

    vocab_size: int = count(65536)
    num_hidden_layers: int = count(32, MAX_LAYERS)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(128000, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    tie_word_embeddings: bool = flag(True)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    conv_bias: bool = flag(False)
    conv_L_cache: int = count(3, MAX_KERNEL)
    layer_types: tuple[str, ...] | None = layer_types((FULL, CONVOLUTION))

    aliases: ClassVar[dict[str, str]] = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
    only_here: ClassVar[dict[str, tuple]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "block_use_swiglu": (True,),
        "use_pos_enc": (True,),
        "theta": (None, 1000000, 1000000.0),
    }
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {
        *("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads"),
        *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    }
    floors_head_dim: ClassVar[bool] = True
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 1e6}

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ConvolutionConfig):
    hidden_size: int = count(2560)
    intermediate_size: int = count(12288)
    block_ff_dim: int | None = count(None, optional=True)
    """Wins over `intermediate_size`."""
    block_auto_adjust_ff_dim: bool = flag(True)
    """True if the width of the MLP is two thirds of the given one, times `block_ffn_dim_multiplier`, rounded up to
    `block_multiple_of`."""
    block_ffn_dim_multiplier: float = number(1.0, 0.0, 1e3)
    block_multiple_of: int = count(256)
    full_attn_idxs: tuple[int, ...] | None = layer_numbers(None)
    """Layers with attention, if `layer_types` is not given; null for all."""

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        inner = self.block_ff_dim or self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            inner = int(self.block_ffn_dim_multiplier * int(2 * inner / 3))
            inner = -(-inner // self.block_multiple_of) * self.block_multiple_of
        types = self.layer_types or tuple(
            FULL if self.full_attn_idxs is None or layer in self.full_attn_idxs else CONVOLUTION
            for layer in range(self.num_hidden_layers)
        )
        attending = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
        return super().derived(fields) | {
            "intermediate_size": inner,
            "layer_types": types,
            "full_attn_idxs": attending,
        }


class Lfm2ForCausalLM(LlamaForCausalLM):
    Config = Lfm2Config
    head_norm = True
    head_norm_names = ("q_layernorm", "k_layernorm")
    other_names: ClassVar[dict[str, str]] = {
        r"^model\.embedding_norm\.": "model.norm.",
        r"\.operator_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"^((?:model\.)?layers\.\d+\.self_attn)\.out_proj\.": r"\1.o_proj.",
        r"\.feed_forward\.": ".mlp.",
        r"(\.mlp\..*)\bw1\.": r"\1gate_proj.",
        r"(\.mlp\..*)\bw3\.": r"\1up_proj.",
        r"(\.mlp\..*)\bw2\.": r"\1down_proj.",
    }

    def make_mixer(self, name: str, index: int) -> Mixer:
        if self.config.layer_types[index] == CONVOLUTION:
            return self.make_convolution(f"{name}.conv")
        return super().make_mixer(name, index)

    def make_convolution(self, name: str) -> ShortConvolution:
        hidden, kernel, bias = self.config.hidden_size, self.config.conv_L_cache, self.config.conv_bias
        return ShortConvolution(
            Linear({f"{name}.in_proj": 3 * hidden}, hidden, bias),
            Convolution({f"{name}.conv": hidden}, kernel, bias),
            Linear({f"{name}.out_proj": hidden}, hidden, bias),
        )
