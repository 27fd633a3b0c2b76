"""Granite 3 with experts, and with an MLP beside them (granitemoeshared)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import (
    ExpertLinear,
    FeedForward,
    GatedLinear,
    GatedMLP,
    Linear,
    MixtureOfExperts,
    RouterLinear,
)
from pace.llm.layers.experts import fused, one_by_one, stacked
from pace.llm.models.families.llama_like.granite import GraniteConfig, GraniteForCausalLM
from pace.llm.models.families.mixtures.config import MixtureConfig
from pace.llm.models.model_config import count, flag
from pace.ops.experts import Router


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(MixtureConfig, GraniteConfig):
    aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    only_here: ClassVar[dict[str, tuple]] = {"shared_intermediate_size": (0,), "mlp_bias": (False,)}

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, "softmax_of_chosen")


class GraniteMoeForCausalLM(GraniteForCausalLM):
    Config = GraniteMoeConfig
    other_names: ClassVar[dict[str, str]] = {
        r"(.*\.block_sparse_moe)\.experts\.gate_up_proj$": r"\1.input_linear.weight",
        r"(.*\.block_sparse_moe)\.experts\.down_proj$": r"\1.output_linear.weight",
        r"(.*\.block_sparse_moe)\.router\.weight$": r"\1.router.layer.weight",
    }
    """As transformers 5 calls them."""

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config, experts = self.config, f"{name}.block_sparse_moe"
        count, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        return MixtureOfExperts(
            RouterLinear({f"{experts}.router.layer": count}, hidden),
            config.router,
            ExpertLinear(
                count,
                hidden,
                fused(f"{experts}.input_linear", 2 * inner, count, hidden, quantised=True),
                stacked(experts, ("gate_proj", "up_proj"), inner, count, hidden),
                one_by_one(f"{experts}.experts", ("gate_proj", "up_proj"), inner),
                glu=True,
            ),
            ExpertLinear(
                count,
                inner,
                fused(f"{experts}.output_linear", hidden, count, inner, quantised=True),
                one_by_one(f"{experts}.experts", ("down_proj",), hidden),
            ),
            config.hidden_act,
            shared=self.make_shared(f"{name}.shared_mlp"),
        )

    def make_shared(self, name: str) -> GatedMLP | None:
        """An MLP that all tokens go through, if there is one."""
        return None


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSharedConfig(GraniteMoeConfig):
    shared_intermediate_size: int = count(0, minimum=0)
    shared_split: bool = flag(False)
    """Whether gate and up of the shared MLP are tensors of their own, as in GGUF."""


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    Config = GraniteMoeSharedConfig

    def make_shared(self, name: str) -> GatedMLP | None:
        hidden, inner = self.config.hidden_size, self.config.shared_intermediate_size
        if inner == 0:
            return None
        gate_up = {f"{name}.input_linear": 2 * inner}
        if self.config.shared_split:
            gate_up = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        return GatedMLP(
            GatedLinear(gate_up, hidden),
            Linear({f"{name}.output_linear": hidden}, inner),
            self.config.hidden_act,
        )
