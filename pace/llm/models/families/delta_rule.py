"""Common parts of Qwen3-Next and Qwen3.5: the gated delta rule in most layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import (
    Attention,
    Block,
    Convolution,
    DeltaNet,
    FloatLinear,
    GatedNorm,
    HeadNorm,
    Linear,
    Rates,
    RMSNorm,
    RowRange,
    TensorSource,
    Vectors,
)
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.layer_types import FULL, LINEAR, check_layer_types, every, layer_types
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_KERNEL,
    MAX_LAYERS,
    MAX_POSITIONS,
    check_divides,
    count,
    flag,
    token_ids,
)


@dataclass(frozen=True, kw_only=True)
class DeltaRuleConfig(LlamaConfig):
    """Fields of layers with the gated delta rule, named `linear_*`."""

    linear_num_key_heads: int = count(16)
    linear_num_value_heads: int = count(32)
    linear_key_head_dim: int = count(128, MAX_HEAD_DIM)
    linear_value_head_dim: int = count(128, MAX_HEAD_DIM)
    linear_conv_kernel_dim: int = count(4, MAX_KERNEL)
    layer_types: tuple[str, ...] | None = layer_types((FULL, LINEAR))
    value_heads_tiled: bool = flag(False)
    """True if value head h reads key head `h % linear_num_key_heads`, as in GGUF files of Qwen3.5. By default the value
    heads of a key head are adjacent."""

    only_here: ClassVar[dict[str, tuple]] = {"hidden_act": ("silu", "swish"), "mlp_bias": (False,)}

    def check(self) -> None:
        super().check()
        if self.linear_num_key_heads and self.linear_num_value_heads:
            check_divides(self, "linear_num_key_heads", "linear_num_value_heads")
        check_layer_types(self.layer_types, self.num_hidden_layers)

    @property
    def keys_width(self) -> int:
        """Elements of all key heads of a delta rule together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def inputs_width(self) -> int:
        """Elements of q, k, v and z of a delta rule together."""
        return 2 * (self.keys_width + self.values_width)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(DeltaRuleConfig):
    """Fields that Qwen3-Next and Qwen3.5 have in common."""

    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(2, optional=True)
    head_dim: int = count(256, MAX_HEAD_DIM)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    full_attention_interval: int = count(4, MAX_LAYERS)
    """Period of the layers that attend, if `layer_types` is not given."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "swish"),
        "mamba_ssm_dtype": (None, "float32"),
    }
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    }
    rope_options: ClassVar[dict[str, Any]] = {"partial": True, "default_partial": 0.25}

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        types = every(self.full_attention_interval, self.num_hidden_layers, LINEAR)
        return super().derived(fields) | {"layer_types": self.layer_types or types}


MTP_PARTS = {
    r"layers\.0": "",
    "fc": ".eh_proj",
    "pre_fc_norm_embedding": ".enorm",
    "pre_fc_norm_hidden": ".hnorm",
    "norm": ".shared_head.norm",
}
"""Parts of `mtp.`, and their names in a further layer."""


class GatedDeltaForCausalLM(LlamaForCausalLM):
    Config: ClassVar[type[GatedDeltaConfig]]
    num_further_layers = 1

    def ignored(self) -> Iterator[str]:
        further = r"mtp\." if self.mtp is None else r"mtp\.layers\.[1-9]"
        yield from (*super().ignored(), rf"(model\.)?{further}.*")

    def add_mtp(self) -> None:
        super().add_mtp()
        further = self.further_layer(0)
        mtp = {rf"^(model\.)?mtp\.{part}\.": f"{further}{here}." for part, here in MTP_PARTS.items()}
        self.other_names = {**self.other_names, **mtp}

    def make_mtp_block(self, name: str) -> Block:
        """Makes a block with attention."""
        return super().make_layer(name, len(self.layers) - 1)

    def make_layer(self, name: str, index: int) -> Block:
        if self.config.layer_types[index] == FULL:
            return super().make_layer(name, index)
        return Block(
            self.make_norm(f"{name}.input_layernorm"),
            self.make_delta_net(f"{name}.linear_attn"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_feed_forward(name, index),
        )

    def make_norm(self, name: str) -> RMSNorm:
        return RMSNorm(name, self.config.hidden_size, self.config.rms_norm_eps, offset=1.0)

    def make_head_norm(self, name: str, num_heads: int) -> HeadNorm:
        return HeadNorm(name, self.config.head_dim, self.config.rms_norm_eps, offset=1.0)

    def make_attention(self, name: str, index: int) -> Attention:
        """Makes an attention with gates. The rows of a head in q_proj are its query, then its gates."""
        config, attention = self.config, super().make_attention(name, index)
        heads, dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size

        def half(first: int) -> TensorSource:
            rows = RowRange(first, heads * dim, dim, 2 * dim)
            return TensorSource((2 * heads * dim, hidden), (rows,), f"{name}.q_proj.weight", f"{name}.q_proj.bias")

        kv = config.num_key_value_heads * dim
        parts = {f"{name}.q_proj": half(0), f"{name}.k_proj": kv, f"{name}.v_proj": kv, f"{name}.q_gate": half(dim)}
        attention.qkv = Linear(parts, hidden, config.qkv_bias)
        attention.gate = "sigmoid"
        return attention

    def make_delta_net(self, name: str) -> DeltaNet:
        config, hidden = self.config, self.config.hidden_size
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        value_dim = config.linear_value_head_dim
        channels = 2 * config.keys_width + config.values_width
        return DeltaNet(
            self.make_inputs(name),
            self.make_steps(name),
            Convolution({f"{name}.conv1d": channels}, config.linear_conv_kernel_dim, activation="silu"),
            Rates({f"{name}.A_log": value_heads}),
            Vectors({f"{name}.dt_bias": value_heads}),
            GatedNorm(f"{name}.norm", value_dim, config.rms_norm_eps, value_heads),
            Linear({f"{name}.out_proj": hidden}, config.values_width),
            key_heads,
            config.linear_key_head_dim,
            value_heads,
            value_dim,
            tiled=config.value_heads_tiled,
        )

    def make_inputs(self, name: str) -> Linear:
        """Makes the product whose columns are q, k, v and z of a delta rule."""
        qkv, values = 2 * self.config.keys_width + self.config.values_width, self.config.values_width
        return Linear({f"{name}.in_proj_qkv": qkv, f"{name}.in_proj_z": values}, self.config.hidden_size)

    def make_steps(self, name: str) -> FloatLinear:
        """Makes the product whose columns are beta and the steps of a delta rule."""
        heads = self.config.linear_num_value_heads
        return FloatLinear({f"{name}.in_proj_b": heads, f"{name}.in_proj_a": heads}, self.config.hidden_size)
