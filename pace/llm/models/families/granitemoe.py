"""Granite 3 with experts, and with a shared MLP (granitemoeshared)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import FeedForward, GatedLinear, GatedMLP, Linear
from pace.llm.models.families.granite import GraniteConfig, GraniteForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, mixture
from pace.llm.models.model_config import count, flag
from pace.ops.experts import Router


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(MixtureConfig, GraniteConfig):
    only_here: ClassVar[dict[str, tuple]] = {"shared_intermediate_size": (0,), "mlp_bias": (False,)}

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, "softmax_of_chosen")


class GraniteMoeForCausalLM(GraniteForCausalLM):
    Config = GraniteMoeConfig
    other_names: ClassVar[dict[str, str]] = {
        r"(.*\.block_sparse_moe)\.input_linear\.weight$": r"\1.experts.gate_up_proj",
        r"(.*\.block_sparse_moe)\.output_linear\.weight$": r"\1.experts.down_proj",
        r"(.*\.block_sparse_moe)\.router\.layer\.": r"\1.router.",
    }
    """Published names -> the names of transformers 5, which are used here."""

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        shared = self.make_shared(f"{name}.shared_mlp")
        return mixture(self.config, f"{name}.block_sparse_moe", self.config.intermediate_size, "router", shared=shared)

    def make_shared(self, name: str) -> GatedMLP | None:
        """Makes the shared MLP of all tokens, or returns None."""
        return None


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSharedConfig(GraniteMoeConfig):
    shared_intermediate_size: int = count(0, minimum=0)
    shared_split: bool = flag(False)
    """True if gate and up of the shared MLP are separate tensors, as in GGUF."""


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
