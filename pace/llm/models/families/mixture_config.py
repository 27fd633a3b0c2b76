"""Common parts of the configs of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import GatedLinear, GatedMLP, Linear
from pace.llm.models.model_config import count, declared
from pace.ops.experts import MAX_EXPERTS, Router


def layer_numbers(null: tuple[int, ...] | None = ()) -> Any:
    """A list of layers; null means the argument `null`."""

    def read(value: Any) -> tuple[int, ...] | None:
        if value is None:
            return null
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise ValueError("a list of numbers of layers, or null")
        return tuple(value)

    return declared(null, read)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Fields about experts, combined with the config of the dense family."""

    num_experts: int = count(8, MAX_EXPERTS)
    num_experts_per_tok: int = count(2, MAX_EXPERTS)

    only_here: ClassVar[dict[str, tuple]] = {"scoring_func": (None, "softmax"), "topk_method": (None, "greedy")}

    def check(self) -> None:
        super().check()
        try:
            _ = self.router
        except ValueError as error:
            said = f"num_experts = {self.num_experts} and num_experts_per_tok = {self.num_experts_per_tok}"
            raise ValueError(f"config.json: the router does not go with {said}: {error}") from None

    @property
    def router(self) -> Router | None:
        """The router; None if no layer has experts. Raises ValueError for inconsistent fields."""
        raise NotImplementedError


def shared_mlp(name: str, hidden: int, inner: int, activation: str, bias: bool = False) -> GatedMLP | None:
    """The shared MLP of all tokens; None if its size is 0."""
    if inner == 0:
        return None
    gate_up = GatedLinear({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, bias)
    return GatedMLP(gate_up, Linear({f"{name}.down_proj": hidden}, inner, bias), activation)
