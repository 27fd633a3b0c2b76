"""How a row chooses its experts (`Router`), and the activations with numbers in their definition. Those without are
names (`pace.ops.reference.ACTIVATIONS`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "sparsemixer", "sigmoid_of_chosen")
"""Ways of scoring."""

MAX_TOP_K = 64
MAX_EXPERTS = 2**16


@dataclass(frozen=True)
class Router:
    """How a row of logits chooses `top_k` of `num_experts` experts, and their weights.

    The highest scores win, with the choice bias added if there is one; among equals, the lower index. With `groups`,
    experts are split into groups of neighbours, and only the `kept_groups` best groups are eligible. Weights are the
    scores of the chosen experts, without bias. Raises ValueError for inconsistent settings."""

    num_experts: int
    top_k: int
    score: str = "softmax"
    """softmax: softmax over all logits. sigmoid: sigmoid of each logit. softmax_of_chosen: the logits; weights are the
    softmax over the chosen. sigmoid_of_chosen (Llama 4): the logits; weights are the sigmoid of each. sparsemixer
    (Phi-3.5-MoE): chooses the largest logit, then the largest of the rest. Each weight is its softmax among the logits
    within `2 * jitter` of it, relative to the larger magnitude; the second excludes the first expert."""
    normalise: bool = False
    """Divides the weights by `max(their sum + eps, least_sum)`."""
    eps: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    """Final factor of the weights."""
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"
    """max: the score of a group is its best expert's. top2: the sum of its two best."""
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
            raise ValueError("group_score='top2' needs two experts or more in each group; got 1")
        if self.score == "sparsemixer" and (self.top_k != 2 or self.groups > 1 or self.normalise or self.scale != 1.0):
            raise ValueError("sparsemixer chooses two experts of all, with weights as they are")
        for name in ("eps", "least_sum", "scale", "jitter"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite; got {getattr(self, name)}")


@dataclass(frozen=True)
class ClampedSwiglu:
    """The activation `g * sigmoid(alpha * g) * (u + 1)` of gate and up (gpt-oss). `g = min(gate, limit)`, and u is up
    clamped to `-limit .. limit`."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha) or not 0 < self.limit < math.inf:
            raise ValueError(f"alpha and limit must be finite, limit above 0; got {self}")


@dataclass(frozen=True)
class Clamp:
    """Limits x to `low .. high`, which may be infinite. NaN stays NaN. Raises ValueError unless `low <= high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"low must be at most high; got {self.low} and {self.high}")


@dataclass(frozen=True)
class Xielu:
    """xIELU (arXiv 2411.13010): `alpha_p x^2 + beta x` for x > 0, else `alpha_n (exp(min(x, eps)) - 1 - x) + beta x`.

    Raises ValueError for numbers that are not finite, and for a positive eps."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.alpha_p, self.alpha_n, self.beta, self.eps))) or self.eps > 0:
            raise ValueError(f"the numbers of xIELU must be finite, and eps at most 0; got {self}")

    @classmethod
    def from_raw(cls, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Xielu:
        """Makes the activation from the numbers of a checkpoint, whose alphas are those before softplus."""
        return cls(softplus(alpha_p), beta + softplus(alpha_n), beta, eps)


Activation = str | Clamp | Xielu
"""An activation of one matrix."""


def softplus(x: float) -> float:
    """Returns `log(1 + exp(x))`."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
