"""OLMo-Hybrid: the gated delta rule in three of four layers, the attention of OLMo 2 in the fourth, rotated or not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Block, Convolution, DeltaNet, FloatLinear, GatedNorm, Linear, Rates, RopeConfig, Vectors
from pace.llm.models.families.delta_rule import DeltaRuleConfig
from pace.llm.models.families.olmo import Olmo2ForCausalLM
from pace.llm.models.layer_types import FULL, LINEAR, every
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, check_divides, count, flag, token_ids
from pace.llm.models.rope_config import read_rope

OUTPUT_EPS = 1e-5
"""Epsilon of the norm of a delta rule's output, independent of rms_norm_eps."""


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DeltaRuleConfig):
    vocab_size: int = count(100352)
    hidden_size: int = count(3840)
    num_hidden_layers: int = count(32, MAX_LAYERS)
    num_attention_heads: int = count(30)
    max_position_embeddings: int = count(65536, MAX_POSITIONS)
    linear_num_key_heads: int = count(None, optional=True)
    """Like the number of value heads, `num_attention_heads` if it is null."""
    linear_num_value_heads: int = count(None, optional=True)
    linear_key_head_dim: int = count(None, MAX_HEAD_DIM, optional=True)
    """If it is null, all key heads together have three quarters of `hidden_size`."""
    linear_value_head_dim: int = count(None, MAX_HEAD_DIM, optional=True)
    """Twice `linear_key_head_dim` if it is null."""
    linear_allow_neg_eigval: bool = flag(True)
    """True if beta is between 0 and 2."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(100257)
    pad_token_id: int | tuple[int, ...] | None = token_ids(100277)

    only_here: ClassVar[dict[str, tuple]] = {"linear_use_gate": (None, True)}
    also_read: ClassVar[frozenset[str]] = DeltaRuleConfig.also_read | {
        *(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"))
    }
    floors_head_dim: ClassVar[bool] = True

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        key_heads = self.linear_num_key_heads or self.num_attention_heads
        key_dim = self.linear_key_head_dim or int(0.75 * self.hidden_size / key_heads)
        types = self.layer_types or every(4, self.num_hidden_layers, LINEAR)
        values = {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": self.linear_num_value_heads or self.num_attention_heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": self.linear_value_head_dim or 2 * key_dim,
            "layer_types": types if self.layer_types or FULL in types else (*types[:-1], FULL),
        }
        check_divides(dataclasses.replace(self, **values), "linear_num_key_heads", "linear_num_value_heads")
        return super().derived(fields) | values

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig | None:
        """Returns None, for no rotation, if `rope_theta` is null."""
        given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        if isinstance(given, dict) and given.get("rope_theta", fields.get("rope_theta", 1e4)) is None:
            return None
        return read_rope(fields, head_dim, self.max_position_embeddings)


class OlmoHybridForCausalLM(Olmo2ForCausalLM):
    Config = OlmoHybridConfig
    ignored_tensors = (*Olmo2ForCausalLM.ignored_tensors, r"(model\.)?mtp\..*")
    other_names: ClassVar[dict[str, str]] = {
        r"\.attention_layer_norm\.": ".input_layernorm.",
        r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    }

    def make_layer(self, name: str, index: int) -> Block:
        if self.config.layer_types[index] == FULL:
            return super().make_layer(name, index)
        return Block(
            self.make_norm(f"{name}.input_layernorm"),
            self.make_delta_net(f"{name}.linear_attn"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_mlp(f"{name}.mlp"),
        )

    def make_delta_net(self, name: str) -> DeltaNet:
        config, hidden = self.config, self.config.hidden_size
        keys, values, heads = config.keys_width, config.values_width, config.linear_num_value_heads
        inputs = {f"{name}.q_proj": keys, f"{name}.k_proj": keys, f"{name}.v_proj": values, f"{name}.g_proj": values}
        channels = {f"{name}.q_conv1d": keys, f"{name}.k_conv1d": keys, f"{name}.v_conv1d": values}
        return DeltaNet(
            Linear(inputs, hidden),
            FloatLinear({f"{name}.b_proj": heads, f"{name}.a_proj": heads}, hidden),
            Convolution(channels, config.linear_conv_kernel_dim, activation="silu"),
            Rates({f"{name}.A_log": heads}),
            Vectors({f"{name}.dt_bias": heads}),
            GatedNorm(f"{name}.o_norm", config.linear_value_head_dim, OUTPUT_EPS, heads),
            Linear({f"{name}.o_proj": hidden}, values),
            config.linear_num_key_heads,
            config.linear_key_head_dim,
            heads,
            config.linear_value_head_dim,
            beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
        )
