"""What a mixture of experts is told besides its weights: how rows choose (`Router`), and an activation with
parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "sparsemixer", "sigmoid_of_chosen")
"""In the order of Router::Score in csrc/include/pace/expert_ops.h."""

MAX_TOP_K = 64
MAX_EXPERTS = 2**16


@dataclass(frozen=True)
class Router:
    """How a row of logits chooses `top_k` of `num_experts` experts, and their weights.

    Scores decide, with the choice bias added where there is one; among equals, the lower number. With `groups`, only
    experts of the `kept_groups` best groups of neighbours can be chosen. Weights are the scores of the chosen, without
    bias. Raises ValueError for what does not fit together."""

    num_experts: int
    top_k: int
    score: str = "softmax"
    """softmax: over all logits. sigmoid: of each. softmax_of_chosen: the logits; weights are the softmax over the
    chosen. sigmoid_of_chosen (Llama 4): the same, but the sigmoid of each. sparsemixer (Phi-3.5-MoE): twice, the largest logit with its softmax among those within `2 * jitter` of it,
    relative to the larger in size; the second time without the first."""
    normalise: bool = False
    """Weights are divided by `max(their sum + eps, least_sum)`."""
    eps: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    """Of the weights, at last."""
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"
    """max: a group is as good as its best expert. top2: as its two best together."""
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}; got {self.score!r}")
        if self.group_score not in ("max", "top2"):
            raise ValueError(f"group_score must be max or top2; got {self.group_score!r}")
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"a router has 1 to {MAX_EXPERTS} experts; got {self.num_experts}")
        if not 1 <= self.kept_groups <= self.groups or self.num_experts % self.groups:
            raise ValueError(
                f"groups divide the experts evenly, and 1 or more are kept; got {self.num_experts} experts in "
                f"{self.groups} groups, of which {self.kept_groups} are kept"
            )
        choices = self.num_experts // self.groups * self.kept_groups
        if not 1 <= self.top_k <= min(choices, MAX_TOP_K):
            raise ValueError(
                f"a row chooses 1 to {min(choices, MAX_TOP_K)} of {choices} experts"
                f"{' in the groups that are kept' if self.groups > 1 else ''}; got {self.top_k}"
            )
        if self.group_score == "top2" and self.groups > 1 and self.num_experts // self.groups < 2:
            raise ValueError("the two best of a group want two experts in each; got groups of 1")
        if self.score == "sparsemixer" and (self.top_k != 2 or self.groups > 1 or self.normalise or self.scale != 1.0):
            raise ValueError("sparsemixer chooses two experts of all, with weights as they are")
        for name in ("eps", "least_sum", "scale", "jitter"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite; got {getattr(self, name)}")


@dataclass(frozen=True)
class ClampedSwiglu:
    """`g * sigmoid(alpha * g) * (u + 1)` of gate and up, `g = min(gate, limit)` and u = up within `-limit .. limit`
    (gpt-oss)."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha) or not 0 < self.limit < math.inf:
            raise ValueError(f"alpha and limit must be finite, limit above 0; got {self}")
