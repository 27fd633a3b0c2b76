"""Laguna (XS, S, M): experts chosen by biased sigmoids, and gated attention. Each layer has its own number of heads.
Layers with a window rotate differently from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Attention, MixtureOfExperts
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, ListedMixturesConfig, biased_mixture
from pace.llm.models.families.windowed import TwoRotationsConfig
from pace.llm.models.layer_types import FULL, SLIDING
from pace.llm.models.model_config import (
    MAX_COUNT,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    count,
    declared,
    number,
    token_ids,
)
from pace.ops.experts import MAX_EXPERTS

PER_HEAD, PER_CHANNEL = GATES = ("per-head", "per-element")
"""A gate for each head, or for each channel of the context."""


def gating() -> Any:
    """One of `GATES`; true for the first."""

    def read(value: Any) -> str:
        if value is True:
            return PER_HEAD
        if value not in GATES:
            raise NotImplementedError(f"{value!r} is not implemented; implemented: true, {', '.join(GATES)}")
        return value

    return declared(PER_HEAD, read)


def heads_of_layers() -> Any:
    """A list of numbers of heads, or null."""

    def read(value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int and 0 < item <= MAX_COUNT for item in value):
            raise ValueError(f"a list of integers in 1..{MAX_COUNT}, or null")
        return tuple(value)

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class LagunaConfig(ListedMixturesConfig, BiasedChoiceConfig, TwoRotationsConfig):
    vocab_size: int = count(100352)
    hidden_size: int = count(2048)
    intermediate_size: int = count(8192)
    num_hidden_layers: int = count(40, MAX_LAYERS)
    num_attention_heads: int = count(48)
    num_attention_heads_per_layer: tuple[int, ...] | None = heads_of_layers()
    num_key_value_heads: int = count(8)
    head_dim: int = count(128, MAX_HEAD_DIM)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    sliding_window: int | None = count(512, MAX_POSITIONS, optional=True)
    gating: str = gating()
    num_experts: int = count(256, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(512)
    shared_expert_intermediate_size: int = count(512, minimum=0)
    moe_router_logit_softcapping: float = number(0.0, 0.0, 1e9)
    """Cap of the router's logits; 0 for no cap."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)
    num_dense: ClassVar[int] = 1

    aliases: ClassVar[dict[str, str]] = {"moe_routed_scaling_factor": "routed_scaling_factor"}
    only_here: ClassVar[dict[str, tuple]] = {
        "gating_types": (None,),
        "mlp_bias": (None, False),
        "moe_apply_router_weight_on_input": (None, False),
        "n_group": (1,),
        "topk_group": (1,),
    }
    without_effect: ClassVar[dict[str, tuple]] = {"mlp_only_layers": ([], [0]), "norm_topk_prob": (True,)}
    normalised_eps: ClassVar[float] = 0.0
    partial: ClassVar[bool] = True
    default_partials: ClassVar[dict[str, float]] = {FULL: 0.5, SLIDING: 1.0}

    def check(self) -> None:
        super().check()
        heads, layers = self.num_attention_heads_per_layer, self.num_hidden_layers
        if heads is not None and (len(heads) != layers or any(count % self.num_key_value_heads for count in heads)):
            raise ValueError(
                f"config.json: num_attention_heads_per_layer must have a multiple of num_key_value_heads for each of "
                f"{layers} layers; got {list(heads)}"
            )

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        same = (self.num_attention_heads,) * self.num_hidden_layers
        heads = {"num_attention_heads_per_layer": self.num_attention_heads_per_layer or same}
        return super().derived(fields) | heads

    def heads(self, layer: int) -> int:
        return self.num_attention_heads_per_layer[layer]

    @property
    def shared_width(self) -> int:
        return self.shared_expert_intermediate_size


class LagunaForCausalLM(LlamaForCausalLM):
    Config = LagunaConfig
    head_norm = True
    other_names: ClassVar[dict[str, str]] = {
        r"(.*\.mlp)\.experts\.e_score_correction_bias": r"\1.gate.e_score_correction_bias",
        r"(.*\.mlp)\.shared_expert\.": r"\1.shared_experts.",
    }

    def make_attention(self, name: str, index: int) -> Attention:
        config, attention = self.config, super().make_attention(name, index)
        width = 1 if config.gating == PER_HEAD else config.head_dim
        attention.add_gate(f"{name}.g_proj", config.heads(index) * width, "softplus")
        return attention

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name, softcap=self.config.moe_router_logit_softcapping or None)
