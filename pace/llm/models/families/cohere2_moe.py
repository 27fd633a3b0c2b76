"""Cohere 2 with experts (Command A+, North Mini Code): attention and experts in parallel on one norm. The first layers
may be dense, with windows of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import FeedForward, GatedLinear, GatedMLP, LayerNorm, Linear, RMSNorm, ScaledMLP
from pace.llm.models.families.cohere import Cohere2Config, Cohere2ForCausalLM
from pace.llm.models.families.mixture_config import DENSE, ListedMixturesConfig, MixtureConfig, mixture, shared_mlp
from pace.llm.models.layer_types import every
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, count, declared, flag, number
from pace.ops.experts import MAX_EXPERTS, Router


def one_of(*values: str) -> Any:
    """A field with one of these values, by default the first."""

    def read(value: Any) -> str:
        if value not in values:
            raise NotImplementedError(f"{value!r} is not implemented; implemented: {', '.join(values)}")
        return value

    return declared(values[0], read)


@dataclass(frozen=True, kw_only=True)
class Cohere2MoeConfig(ListedMixturesConfig, MixtureConfig, Cohere2Config):
    head_dim: int = count(128, MAX_HEAD_DIM)
    rms_norm_eps: float | None = number(None, 0.0, 1.0, optional=True)
    """Epsilon of RMS norms; null for layer norms."""
    num_experts: int = count(8, MAX_EXPERTS)
    num_experts_per_tok: int = count(2, MAX_EXPERTS)
    num_shared_experts: int = count(0, minimum=0)
    shared_expert_combination_strategy: str = one_of("average", "sum")
    expert_selection_fn: str = one_of("softmax", "sigmoid")
    """Makes weights of the logits of the chosen experts."""
    norm_topk_prob: bool = flag(True)
    """True if the weights of sigmoid are divided by their sum."""
    first_k_dense_replace: int = count(0, MAX_LAYERS, minimum=0)
    """Number of first layers without experts, if `mlp_layer_types` is not given."""
    prefix_dense_sliding_window_pattern: int = count(1, MAX_LAYERS)
    """Period of the first layers that see all positions. If it is 1, dense layers rotate."""
    prefix_dense_intermediate_size: int | None = count(None, optional=True)
    """Width of the dense layers; null for `intermediate_size`."""

    only_here: ClassVar[dict[str, tuple]] = {"position_embedding_type": (None, "rope_gptj")}

    @property
    def num_dense(self) -> int:
        return self.first_k_dense_replace

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        first = min(self.first_k_dense_replace, self.num_hidden_layers)
        dense = every(self.prefix_dense_sliding_window_pattern, first)
        return self.layer_types or dense + every(self.sliding_window_pattern, self.num_hidden_layers - first)

    @property
    def router(self) -> Router:
        return Router(
            self.num_experts,
            self.num_experts_per_tok,
            f"{self.expert_selection_fn}_of_chosen",
            normalise=self.expert_selection_fn == "sigmoid" and self.norm_topk_prob,
            scale=0.5 if self.averages else 1.0,
        )

    @property
    def averages(self) -> bool:
        """True if a layer's output is the mean of its experts' sum and the shared MLP."""
        return self.num_shared_experts > 0 and self.shared_expert_combination_strategy == "average"

    def rotation(self, layer: int) -> int | None:
        is_dense = self.mlp_layer_types[layer] == DENSE
        return 0 if self.slides(layer) or is_dense and self.prefix_dense_sliding_window_pattern == 1 else None


class Cohere2MoeForCausalLM(Cohere2ForCausalLM):
    Config = Cohere2MoeConfig

    def make_norm(self, name: str) -> RMSNorm | LayerNorm:
        if self.config.rms_norm_eps is None:
            return super().make_norm(name)
        return RMSNorm(name, self.config.hidden_size, self.config.rms_norm_eps)

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config, mlp = self.config, f"{name}.mlp"
        if not config.has_experts(index):
            return self.make_mlp(mlp, config.prefix_dense_intermediate_size)
        return mixture(config, mlp, config.intermediate_size, shared=self.make_shared(f"{mlp}.shared_experts"))

    def make_shared(self, name: str) -> GatedMLP | None:
        """Makes the shared MLP of all tokens, or returns None."""
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size * config.num_shared_experts
        if not config.averages:
            return shared_mlp(config, name, inner)
        gate_up = GatedLinear({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden)
        return ScaledMLP(gate_up, Linear({f"{name}.down_proj": hidden}, inner), config.hidden_act, 0.5)
