"""Mixtures of experts on the C++ kernels: stacks of weights, routing, and products with the chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_heads, check_rows, check_vector, describe
from pace.ops.experts import Router
from pace.ops.protocol import ExpertOptions
from pace.ops.weight import PackedWeight, Room, weight_nbytes
from pace.ops.weight_layout import AnyLayout

ALIGNMENT = 4096
"""Experts are page-aligned, so that each can be mapped, read ahead and dropped separately."""


class ExpertStack:
    """One matrix for each expert, or for each head: `experts` are weights `[n, k]` of one layout, `stride` bytes apart
    in one block of memory. Each is an ordinary `PackedWeight`. `nbytes` includes the gaps.

    For a mapped stack, the kernel prefetches the pages of chosen experts from the file."""

    __slots__ = ("address", "experts", "glu", "is_mapped", "k", "layout", "n", "n_out", "nbytes", "stride")

    def __init__(self, count: int, n: int, k: int, layout: AnyLayout, glu: bool = False, room: Room | None = None):
        """`room`: page-aligned memory of `nbytes`; allocated if None. If it already holds the experts, the stack is
        marked as mapped until `is_mapped` is changed. Raises ValueError if it should hold them and does not."""
        if count < 1:
            raise ValueError(f"a stack has one expert or more; got {count}")
        self.n, self.k, self.layout, self.glu = n, k, layout, glu
        self.n_out = n // 2 if glu else n
        self.stride = _stride(n, k, layout, glu)
        self.nbytes = count * self.stride
        room = room or Room.take(self.nbytes, ALIGNMENT)
        self.address, self.is_mapped = room.address, room.is_packed
        self.experts = [PackedWeight(n, k, layout, glu, room=room.at(i * self.stride)) for i in range(count)]

    def __len__(self) -> int:
        return len(self.experts)

    def __repr__(self) -> str:
        return f"ExpertStack({len(self)} x {self.experts[0]!r})"


def _stride(n: int, k: int, layout: AnyLayout, glu: bool) -> int:
    return -(-weight_nbytes(n, k, layout, glu) // ALIGNMENT) * ALIGNMENT


def stack_nbytes(count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
    return count * _stride(n, k, layout, glu)


def empty_stack(count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> ExpertStack:
    return ExpertStack(count, n, k, layout, glu)


def route(
    logits: Tensor, router: Router, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> Tensor:
    rows, columns = check_rows("logits", logits)
    if columns != router.num_experts:
        raise ValueError(f"logits must be float32 [T, {router.num_experts}]; got {describe(logits)}")
    check_router_vectors(router, choice_bias, expert_scale)
    out = torch.empty(rows, 2 * router.top_k)
    _C.route(logits, router, choice_bias, expert_scale, out)
    return out


def experts(
    x: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    routing: Tensor,
    options: ExpertOptions,
    residual: Tensor | None = None,
) -> Tensor:
    """Products as in `linear`."""
    check_stacks(gate_up, down, options)
    rows, columns = check_rows("x", x)
    if columns != gate_up.k:
        raise ValueError(f"x must be float32 [T, {gate_up.k}]; got {describe(x)}")
    check_routing(routing, rows, len(gate_up))
    if residual is not None and (check_rows("residual", residual) != (rows, down.n) or not residual.is_contiguous()):
        raise ValueError(f"residual must be contiguous float32 [{rows}, {down.n}]; got {describe(residual)}")
    out = torch.empty(rows, down.n)
    _C.experts(x, routing, len(gate_up), gate_up, down, options, residual, out)
    return out


def heads_linear(x: Tensor, weights: ExpertStack) -> Tensor:
    """Products as in `linear`."""
    tokens, heads, head_dim = check_heads("x", x)
    check_head_stack(weights, heads, head_dim)
    out = torch.empty(tokens, heads * weights.n)
    _C.heads_linear(x, weights, out)
    return out


# -- checks that recorded operations share


def check_router_vectors(router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None) -> None:
    for name, vector in (("choice_bias", choice_bias), ("expert_scale", expert_scale)):
        if vector is not None:
            check_vector(name, vector, router.num_experts)


def check_stacks(gate_up: ExpertStack, down: ExpertStack, options: ExpertOptions) -> None:
    """Raises ValueError unless the output of `gate_up` fits the input of `down`, and biases fit both."""
    if down.glu:
        raise ValueError("experts have a stack of down that is made without glu; got one made with it")
    if not gate_up.glu and not isinstance(options.activation, str):
        raise ValueError(f"experts without gates have the name of an activation; got {options.activation}")
    if len(gate_up) != len(down) or gate_up.n_out != down.k:
        raise ValueError(
            f"gate_up gives {gate_up.n_out} elements from each of {len(gate_up)} experts, and down takes {down.k} in "
            f"each of {len(down)}"
        )
    for stack, bias in ((gate_up, options.gate_up_bias), (down, options.down_bias)):
        if bias is not None and (
            bias.shape != (len(stack), stack.n) or bias.dtype != torch.float32 or not bias.is_contiguous()
        ):
            raise ValueError(f"bias must be contiguous float32 [{len(stack)}, {stack.n}]; got {describe(bias)}")


def check_head_stack(weights: ExpertStack, heads: int, head_dim: int) -> None:
    """Raises ValueError unless the stack has a weight for each of these heads."""
    if weights.glu or len(weights) != heads or weights.k != head_dim:
        raise ValueError(
            f"x has {heads} heads of {head_dim} elements; the weights are {len(weights)} x [{weights.n}, {weights.k}]"
            f"{' of gate and up' if weights.glu else ''}"
        )


def check_routing(routing: Tensor, rows: int, num_experts: int) -> None:
    """Raises ValueError for a routing that `route` cannot have returned."""
    found, columns = check_rows("routing", routing)
    if found != rows or columns < 2 or columns % 2 or columns // 2 > num_experts or not routing.is_contiguous():
        raise ValueError(f"routing must be contiguous float32 [{rows}, 2 top_k]; got {describe(routing)}")
    chosen = routing[:, : columns // 2]
    if not ((chosen >= 0) & (chosen < num_experts) & (chosen == chosen.floor())).all():
        raise ValueError(f"routing names experts that are not in 0..{num_experts - 1}")
    if not (chosen.diff(dim=1) > 0).all():
        raise ValueError("routing names the experts of a row ascending, each once")
