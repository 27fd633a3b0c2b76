"""Common parts of the configs of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import (
    GatedLinear,
    GatedMLP,
    Linear,
    MixtureOfExperts,
    RouterLinear,
    Vectors,
    expert_stacks,
)
from pace.llm.models.model_config import count, declared, flag, number
from pace.ops.experts import MAX_EXPERTS, Router

DENSE, SPARSE = MLP_TYPES = ("dense", "sparse")
"""Kinds of feed-forwards: an MLP, or a mixture."""


def layer_numbers(null: tuple[int, ...] | None = ()) -> Any:
    """A list of layers; null means the argument `null`."""

    def read(value: Any) -> tuple[int, ...] | None:
        if value is None:
            return null
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise ValueError("a list of numbers of layers, or null")
        return tuple(value)

    return declared(null, read)


def mlp_layer_types() -> Any:
    """A field with the kind of feed-forward of each layer, from `MLP_TYPES`, or null."""

    def read(value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not all(item in MLP_TYPES for item in value):
            raise ValueError("a list of dense and sparse, or null")
        return tuple(value)

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Fields about experts, combined with the config of the dense family."""

    num_experts: int = count(8, MAX_EXPERTS)
    num_experts_per_tok: int = count(2, MAX_EXPERTS)

    aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    only_here: ClassVar[dict[str, tuple]] = {"scoring_func": (None, "softmax"), "topk_method": (None, "greedy")}
    scores: ClassVar[str] = "softmax"
    """How logits become the weights of experts; see `Router`."""

    def check(self) -> None:
        super().check()
        try:
            _ = self.router
        except ValueError as error:
            said = f"num_experts = {self.num_experts} and num_experts_per_tok = {self.num_experts_per_tok}"
            raise ValueError(f"config.json: the router does not fit {said}: {error}") from None

    @property
    def router(self) -> Router | None:
        """The router; None if no layer has experts. Raises ValueError for inconsistent fields."""
        return Router(self.num_experts, self.num_experts_per_tok, self.scores, normalise=self.norm_topk_prob)

    def has_experts(self, layer: int) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class BiasedChoiceConfig(MixtureConfig):
    """Fields for experts that a sigmoid of each logit weighs and a bias helps to choose, as in DeepSeek-V3. They come
    from the groups with the largest sum of their two best."""

    moe_intermediate_size: int = count(1408)
    n_shared_experts: int = count(1, minimum=0)
    """Width of the shared MLP, in experts."""
    routed_scaling_factor: float = number(1.0, -1e9, 1e9)
    n_group: int = count(1, MAX_EXPERTS)
    topk_group: int = count(1, MAX_EXPERTS)
    norm_topk_prob: bool = flag(True)

    aliases: ClassVar[dict[str, str]] = {
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    only_here: ClassVar[dict[str, tuple]] = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
    normalised_eps: ClassVar[float] = 1e-20
    """Added to the sum by which the weights are divided."""

    @property
    def router(self) -> Router | None:
        return Router(
            self.num_experts,
            self.num_experts_per_tok,
            "sigmoid",
            normalise=self.norm_topk_prob,
            eps=self.normalised_eps,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            kept_groups=self.topk_group,
            group_score="top2",
        )

    @property
    def shared_width(self) -> int:
        """Width of the shared MLP; 0 for none."""
        return self.moe_intermediate_size * self.n_shared_experts


@dataclass(frozen=True, kw_only=True)
class ListedMixturesConfig:
    """The list of the layers that have experts, combined with another config."""

    mlp_layer_types: tuple[str, ...] | None = mlp_layer_types()

    @property
    def num_dense(self) -> int:
        """Number of first layers without experts, if `mlp_layer_types` is not given."""
        return 0

    def check(self) -> None:
        super().check()
        if self.mlp_layer_types is not None and len(self.mlp_layer_types) < self.num_hidden_layers:
            raise ValueError(
                f"config.json: mlp_layer_types must name {self.num_hidden_layers} layers; got "
                f"{len(self.mlp_layer_types)}"
            )

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        kinds = [DENSE if layer < self.num_dense else SPARSE for layer in range(self.num_hidden_layers)]
        return super().derived(fields) | {"mlp_layer_types": self.mlp_layer_types or tuple(kinds)}

    def has_experts(self, layer: int) -> bool:
        return self.mlp_layer_types[layer] == SPARSE


def mixture(
    config: Any, name: str, inner: int, gate: str = "gate", transposed: bool = False, **options: Any
) -> MixtureOfExperts:
    """Makes the mixture of a `MixtureConfig` below `name`, with experts of the width `inner`. `gate` names the router's
    tensor, `transposed` is that of `expert_stacks`, and `options` are those of `MixtureOfExperts`."""
    count, hidden = config.num_experts, config.hidden_size
    return MixtureOfExperts(
        RouterLinear({f"{name}.{gate}": count}, hidden),
        config.router,
        *expert_stacks(f"{name}.experts", count, hidden, inner, transposed=transposed),
        config.hidden_act,
        **options,
    )


def biased_mixture(config: Any, name: str, **options: Any) -> MixtureOfExperts:
    """Makes the mixture of a `BiasedChoiceConfig` below `name`, next to a shared MLP. `options` are those of
    `MixtureOfExperts`."""
    bias = Vectors({f"{name}.gate.e_score_correction_bias": config.num_experts})
    shared = shared_mlp(config, f"{name}.shared_experts", config.shared_width)
    return mixture(config, name, config.moe_intermediate_size, choice_bias=bias, shared=shared, **options)


def shared_mlp(config: Any, name: str, inner: int, bias: bool = False) -> GatedMLP | None:
    """Makes the shared MLP of all tokens, of the width `inner`. Returns None if that is 0."""
    if inner == 0:
        return None
    hidden = config.hidden_size
    gate_up = GatedLinear({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, bias)
    return GatedMLP(gate_up, Linear({f"{name}.down_proj": hidden}, inner, bias), config.hidden_act)
