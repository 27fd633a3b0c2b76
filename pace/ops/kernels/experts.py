"""Mixtures of experts on the C++ kernels: stacks of weights, routing, and products with the chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_heads, check_rows, check_vector, describe
from pace.ops.experts import SCORES, ClampedSwiglu, Router
from pace.ops.kernels.linear import activation_code
from pace.ops.weight import PackedWeight, Room, weight_nbytes
from pace.ops.weight_layout import AnyLayout

CLAMPED_SWIGLU = 6
"""Number of this Activation in csrc/include/pace/types.h."""

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
    """Bytes of a stack, gaps included."""
    return count * _stride(n, k, layout, glu)


def empty_stack(count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> ExpertStack:
    """Returns a stack of zeros; its `experts` are filled like other weights."""
    return ExpertStack(count, n, k, layout, glu)


def route(logits: Tensor, router: Router, choice_bias: Tensor | None = None) -> Tensor:
    """Returns `[T, 2 top_k]`: the experts that rows of `logits [T, E]` choose, ascending, then their weights
    (`ForwardOps.route`)."""
    rows, columns = check_rows("logits", logits)
    if columns != router.num_experts:
        raise ValueError(f"logits must be float32 [T, {router.num_experts}]; got {describe(logits)}")
    out = torch.empty(rows, 2 * router.top_k)
    _C.route(logits.data_ptr(), logits.stride(0), rows, lower_router(router, choice_bias), out.data_ptr())
    return out


def experts(
    x: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    routing: Tensor,
    activation: str | ClampedSwiglu,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    weigh_inputs: bool = False,
) -> Tensor:
    """Returns `[T, H]`: `residual + w1 f1(x) + w2 f2(x) + ...`, added in this order, for the experts and weights in
    `routing` (`ForwardOps.experts`). Products as in `linear`; a row's result does not depend on the other rows."""
    check_stacks(gate_up, down)
    rows, columns = check_rows("x", x)
    if columns != gate_up.k:
        raise ValueError(f"x must be float32 [T, {gate_up.k}]; got {describe(x)}")
    check_routing(routing, rows, len(gate_up))
    if residual is not None and (check_rows("residual", residual) != (rows, down.n) or not residual.is_contiguous()):
        raise ValueError(f"residual must be contiguous float32 [{rows}, {down.n}]; got {describe(residual)}")
    out = torch.empty(rows, down.n)
    _C.experts(
        x.data_ptr(),
        x.stride(0),
        rows,
        routing.data_ptr(),
        len(gate_up),
        routing.shape[1] // 2,
        lower_stack(gate_up, gate_up_bias),
        lower_stack(down, down_bias),
        *lower_activation(activation),
        weigh_inputs,
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
    )
    return out


def heads_linear(x: Tensor, weights: ExpertStack) -> Tensor:
    """Returns `[T, H * N]`: `x[:, h] W_h'` for every head h of `x [T, H, K]`, which may be a strided view. Products as
    in `linear`."""
    tokens, heads, head_dim = check_heads("x", x)
    check_head_stack(weights, heads, head_dim)
    out = torch.empty(tokens, heads * weights.n)
    _C.heads_linear(x.data_ptr(), x.stride(0), x.stride(1), tokens, heads, lower_stack(weights, None), out.data_ptr())
    return out


def gate_(x: Tensor, gate: Tensor) -> None:
    """Multiplies rows of `x [T, K]` by the sigmoid of `gate [T, 1]`, in place."""
    rows, k = check_rows("x", x)
    if check_rows("gate", gate) != (rows, 1):
        raise ValueError(f"gate must be float32 [{rows}, 1]; got {describe(gate)}")
    _C.gate(x.data_ptr(), x.stride(0), rows, k, gate.data_ptr(), gate.stride(0))


# -- conversion to C++ types


def lower_router(router: Router, choice_bias: Tensor | None) -> _C.Router:
    bias = 0 if choice_bias is None else check_vector("choice_bias", choice_bias, router.num_experts)
    return _C.Router(
        SCORES.index(router.score),
        router.num_experts,
        router.top_k,
        router.groups,
        router.kept_groups,
        router.group_score == "top2",
        router.normalise,
        router.eps,
        router.least_sum,
        router.scale,
        router.jitter,
        bias,
    )


def lower_stack(stack: ExpertStack, bias: Tensor | None) -> _C.ExpertStack:
    if bias is not None and (
        bias.shape != (len(stack), stack.n) or bias.dtype != torch.float32 or not bias.is_contiguous()
    ):
        raise ValueError(f"bias must be contiguous float32 [{len(stack)}, {stack.n}]; got {describe(bias)}")
    return _C.ExpertStack(stack.address, stack.stride, 0 if bias is None else bias.data_ptr(), stack.is_mapped)


def lower_activation(activation: str | ClampedSwiglu) -> tuple[int, float, float]:
    if isinstance(activation, ClampedSwiglu):
        return CLAMPED_SWIGLU, activation.alpha, activation.limit
    return activation_code(activation), 0.0, 0.0


def check_stacks(gate_up: ExpertStack, down: ExpertStack) -> None:
    """Raises ValueError unless the output of `gate_up` fits the input of `down`."""
    if not gate_up.glu or down.glu:
        raise ValueError("experts are a stack of gate and up, made with glu=True, and one of down, made without")
    if len(gate_up) != len(down) or gate_up.n_out != down.k:
        raise ValueError(
            f"gate_up gives {gate_up.n_out} elements from each of {len(gate_up)} experts, and down takes {down.k} in "
            f"each of {len(down)}"
        )


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
