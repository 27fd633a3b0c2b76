"""LFM3: LFM2 with windows on some layers, which rotate differently, norms after each branch, and a gate for each
head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Attention, RopeConfig
from pace.llm.models.families.lfm2 import ConvolutionConfig, Lfm2ForCausalLM
from pace.llm.models.families.windowed import TwoRotationsConfig
from pace.llm.models.layer_types import CONVOLUTION, FULL, SLIDING, layer_types
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_KERNEL, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids
from pace.llm.models.rope_config import fields_of_layers, read_rope

DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""The rotations of a config.json without `rope_parameters`."""


@dataclass(frozen=True, kw_only=True)
class Lfm3Config(ConvolutionConfig, TwoRotationsConfig):
    vocab_size: int = count(128000)
    hidden_size: int = count(2048)
    intermediate_size: int = count(7680)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(4, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    sliding_window: int | None = count(256, MAX_POSITIONS, optional=True)
    conv_L_cache: int = count(7, MAX_KERNEL)
    layer_types: tuple[str, ...] | None = layer_types((FULL, SLIDING, CONVOLUTION))
    use_sandwich_norm: bool = flag(True)
    """True if the output of each branch is normalised."""
    use_attention_gate: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(124894)
    eos_token_id: int | tuple[int, ...] | None = token_ids(124900)
    pad_token_id: int | tuple[int, ...] | None = token_ids(124893)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (False, True), "theta": (None,)}

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        usual = (CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION), (SLIDING, CONVOLUTION, FULL, CONVOLUTION)
        return self.layer_types or tuple(usual[layer > 0][layer % 4] for layer in range(self.num_hidden_layers))

    def rope_of(self, kind: str, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        given = fields.get("rope_parameters")
        own = fields_of_layers({"rope_parameters": DEFAULT_ROPES if given is None else given}, kind)
        return read_rope(own, head_dim, self.max_position_embeddings)


class Lfm3ForCausalLM(Lfm2ForCausalLM):
    Config = Lfm3Config
    head_norm_names = ("q_norm", "k_norm")
    other_names: ClassVar[dict[str, str]] = {
        **Lfm2ForCausalLM.other_names,
        r"\.self_attn\.g_proj\.": ".self_attn.gate_proj.",
    }

    @property
    def post_norm_names(self) -> tuple[str, ...]:
        return ("post_operator_norm", "post_ffn_norm") if self.config.use_sandwich_norm else ()

    def make_attention(self, name: str, index: int) -> Attention:
        attention = super().make_attention(name, index)
        if self.config.use_attention_gate:
            attention.add_gate(f"{name}.gate_proj", self.config.num_attention_heads, "sigmoid")
        return attention
