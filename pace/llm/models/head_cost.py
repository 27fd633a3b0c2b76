"""Cost of the LM head: `head_cost`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pace.llm.layers import Embedding, MixtureOfExperts, TiedLMHead
from pace.memory import format_bytes
from pace.naming import dtype_name
from pace.ops.protocol import WeightOps

if TYPE_CHECKING:
    from pace.llm.models.base_model import BaseModelForCausalLM

LARGE = 0.25
"""Share of a token's bytes above which the head is named when a model is loaded."""


@dataclass(frozen=True)
class HeadCost:
    """Size of the LM head, and its share of the weights that decoding reads."""

    format: str
    """A dtype, a format, or the layout of a checkpoint's codes."""
    num_bytes: int
    token_bytes: int
    """Bytes of weights that one token reads. Towers, a layer for multi-token prediction, experts that it does not
    choose, and an embedding that is not the head are not counted."""
    is_embedding: bool
    """True if the embedding is the same matrix."""

    @property
    def share(self) -> float:
        """The head's part of `token_bytes`, from 0 to 1."""
        return self.num_bytes / self.token_bytes

    def __str__(self) -> str:
        what = "LM head and embedding, one matrix," if self.is_embedding else "LM head"
        return (
            f"{what} in {self.format}: {format_bytes(self.num_bytes)}, {100 * self.share:.0f} % of the weights that a "
            "token reads"
        )


def head_cost(model: BaseModelForCausalLM, ops: WeightOps, dtype: torch.dtype) -> HeadCost:
    """Computes the cost from the plans of a model's matrices; the model need not be loaded. `dtype`: of floats."""
    head = model.lm_head
    matrix = head.embedding if isinstance(head, TiedLMHead) else head
    children = [child for child in model.children() if child not in model.layers_aside]
    read = sum(child.planned_nbytes(ops, dtype) for child in children)
    for part in (part for child in children for part in child.walk()):
        if isinstance(part, Embedding) and part is not matrix:
            read -= part.planned_nbytes(ops, dtype)
        elif isinstance(part, MixtureOfExperts):
            experts = part.gate_up.planned_nbytes(ops, dtype) + part.down.planned_nbytes(ops, dtype)
            read -= experts * (part.router.num_experts - part.router.top_k) // part.router.num_experts
    names = [*matrix.plan.formats.values(), *matrix.plan.layouts.values(), dtype]
    return HeadCost(dtype_name(names[0]), matrix.planned_nbytes(ops, dtype), read, isinstance(head, TiedLMHead))
