"""nomic-bert: BERT with rotations. nomic-embed-text v1 and v1.5 have gates and no biases in their layers. v2-moe has
biases, no gates, and a mixture of experts in every other layer.

Configs are read in the spelling of transformers, and in that of the code that the Hub's checkpoints came with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.layers import (
    AddedVector,
    ExpertLinear,
    FeedForward,
    MixtureOfExperts,
    RopeConfig,
    RouterLinear,
    fused,
    one_by_one,
    stacked,
)
from pace.llm.models.encoders.rotary_encoder import RotaryEncoder, RotaryEncoderConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, declared, flag, token_ids
from pace.llm.models.rope_config import read_rope
from pace.naming import shown
from pace.ops.experts import MAX_EXPERTS, Router
from pace.ops.protocol import ForwardOps

logger = logging.getLogger("pace")

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu"}
"""Names of feed-forwards in the Hub's spelling, and their activations. Those before the last have gates."""
UNGATED = "gelu"


def feed_forward() -> Any:
    """A field with the name of a feed-forward in the Hub's spelling, or null."""

    def read(value: Any) -> str | None:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"one of {', '.join(ACTIVATIONS)}")
        if value is not None and value not in ACTIVATIONS:
            raise NotImplementedError(f"{value!r} is not implemented; implemented: {', '.join(ACTIVATIONS)}")
        return value

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class NomicBertConfig(RotaryEncoderConfig):
    vocab_size: int = count(30528)
    hidden_act: str = activation("silu")
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    type_vocab_size: int = count(2, minimum=0)
    intermediate_size: int | None = count(3072, optional=True)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    activation_function: str | None = feed_forward()
    n_positions: int | None = count(None, MAX_POSITIONS, optional=True)
    max_trained_positions: int = count(2048, MAX_POSITIONS)
    qkv_proj_bias: bool = flag(False)
    mlp_fc1_bias: bool = flag(False)
    mlp_fc2_bias: bool = flag(False)
    moe_every_n_layers: int | None = count(None, MAX_LAYERS, minimum=0, optional=True)
    moe_top_k: int = count(1)
    num_experts: int | None = count(None, MAX_EXPERTS, minimum=0, optional=True)

    default_theta = 1000.0
    aliases: ClassVar[dict[str, str]] = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }
    only_here: ClassVar[dict[str, tuple]] = {
        "causal": (False,),
        "expert_choice_router": (None, False),
        "ffn_div": (1,),
        "moe_normalize_expert_weights": (None, False),
        "num_shared_experts": (None, 0),
        "parallel_block": (False,),
        "parallel_block_tied_norm": (False,),
        "prenorm": (False,),
        "rotary_emb_fraction": (1.0, 1),
        "rotary_emb_interleaved": (False,),
        "rotary_emb_scale_base": (None,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "use_rms_norm": (False, None),
    }
    without_effect: ClassVar[dict[str, tuple]] = {
        "dense_seq_output": (True,),
        "fused_bias_fc": (True, False),
        "fused_dropout_add_ln": (True, False),
        "moe_impl": ("megablocks",),
        "pad_vocab_size_multiple": (64, 1),
        "reorder_and_upcast_attn": (False,),
        "use_flash_attn": (True, False),
        "use_xentropy": (True, False),
    }
    also_read: ClassVar[frozenset[str]] = RotaryEncoderConfig.also_read | {"rotary_scaling_factor"}

    def check(self) -> None:
        super().check()
        if not self.moe_every_n_layers:
            return
        if self.activation_function != UNGATED:
            raise NotImplementedError(
                f"config.json: activation_function = {shown(self.activation_function)} is not implemented for experts; "
                f"implemented: {UNGATED}"
            )
        if not self.num_experts or self.moe_top_k > self.num_experts:
            raise ValueError(
                f"config.json: with moe_every_n_layers, moe_top_k must be at most num_experts; got {self.moe_top_k} "
                f"and {self.num_experts}"
            )

    def has_experts(self, layer: int) -> bool:
        """True if a layer is a mixture of experts."""
        return bool(self.moe_every_n_layers) and layer % self.moe_every_n_layers == 1

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields) | {"intermediate_size": self.intermediate_size or 4 * self.hidden_size}
        if self.activation_function is not None:
            values["hidden_act"] = ACTIVATIONS[self.activation_function]
        if "max_position_embeddings" not in fields and self.n_positions is not None:
            scaled = fields.get("rotary_scaling_factor") is not None
            values["max_position_embeddings"] = (
                self.n_positions if scaled else min(self.n_positions, self.max_trained_positions)
            )
        return values

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        factor = fields.get("rotary_scaling_factor")
        if factor is None:
            return super().read_rope(fields, head_dim)
        scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": factor}, "rope_theta": fields.get("rope_theta")}
        return read_rope(scaled, head_dim, self.max_trained_positions, default_theta=self.default_theta)


class NomicBertModel(RotaryEncoder):
    Config = NomicBertConfig
    prefix = "nomic_bert."
    head_names = ("nomic_bert.pooler.dense", "classifier")
    config: NomicBertConfig
    text_prefixes: ClassVar[dict[str, str]] = {"bert.": "nomic_bert."}
    other_names: ClassVar[dict[str, str]] = {
        r"(^|\.)encoder\.layers\.": r"\1layers.",
        r"(^|\.)emb_ln\.": r"\1embeddings.LayerNorm.",
        r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.mlp\.fc11?\.": ".mlp.up_proj.",
        r"\.mlp\.fc12\.": ".mlp.gate_proj.",
        r"\.mlp\.fc2\.": ".mlp.down_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
    }

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().choose(tensors)
        if any(name.endswith(".experts.up_proj.weight") for name in tensors):
            logger.warning("GGUF files do not have the biases after experts, which llama.cpp leaves out")
            for layer in self.layers:
                if isinstance(layer.mlp, BiasedMixture):
                    layer.mlp.bias.drop()

    @property
    def attention_bias(self) -> bool:
        return self.config.qkv_proj_bias

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config = self.config
        biases = config.mlp_fc1_bias, config.mlp_fc2_bias
        if config.has_experts(index):
            return self.make_mixture(name)
        if config.activation_function == UNGATED:
            return self.make_plain(f"{name}.up_proj", f"{name}.down_proj", *biases)
        return self.make_gated(name, *biases)

    def make_mixture(self, name: str) -> BiasedMixture:
        hidden, inner, count = self.config.hidden_size, self.config.intermediate_size, self.config.num_experts
        experts = f"{name}.experts"
        # Both matrices of the Hub's code have the experts' rows of the inner width below each other.
        forms = [
            (
                one_by_one(experts, (tensor,), rows),
                fused(f"{experts}.mlp.{own}", rows, count, columns, transposed, flat=True),
                stacked(experts, (tensor,), rows, count, columns),
            )
            for tensor, own, rows, columns, transposed in (
                ("up_proj", "w1", inner, hidden, False),
                ("down_proj", "w2", hidden, inner, True),
            )
        ]
        return BiasedMixture(
            AddedVector(f"{experts}.bias", hidden),
            RouterLinear({f"{name}.router.layer": count}, hidden),
            Router(count, self.config.moe_top_k),
            ExpertLinear(count, hidden, *forms[0]),
            ExpertLinear(count, inner, *forms[1]),
            self.config.hidden_act,
        )


class BiasedMixture(MixtureOfExperts):
    """A mixture of experts, plus one vector."""

    def __init__(self, bias: AddedVector, *parts: Any):
        """`parts`: the arguments of `MixtureOfExperts`."""
        super().__init__(*parts)
        self.bias = bias

    def __call__(self, ops: ForwardOps, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.bias(ops, super().__call__(ops, x, residual))
