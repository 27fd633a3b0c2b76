"""Rounds a matrix of floats to codes, using statistics of its inputs: nearest rounding with fitted scales, and GPTQ.

    W [N, K], H = sum over tokens of x x' [K, K]          error of the product: tr((Q - W) H (Q - W)')

Groups are neighbouring columns, and their scales are fixed before the first column is rounded. Columns may therefore be
rounded in any order; they are stored in their original order. Source of GPTQ: arXiv 2210.17323."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pace.ops.weight_layout import CODES, QuantizedRows, WeightLayout
from pace.quant import int4

LEVELS = {"int8": (-127, 127), "int4": (-8, 7)}
"""Minimum and maximum level of a code. int4 stores the level plus 8."""

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to the diagonal. It keeps the weights of columns that the calibration
text hardly uses, and makes H invertible."""

BLOCK = 32
"""Number of columns whose errors are applied to the rest of the matrix in one product."""

STEPS_TO_LARGEST = (*int4.STEPS_TO_LARGEST, 10.0)
"""Candidates for a group's int4 scale. If squared errors are weighted, the largest weight may matter little."""


def importance(hessian_diagonal: Tensor) -> Tensor:
    """Positive weights `[K]` of squared errors by column, from the mean squares of the inputs."""
    mean = hessian_diagonal.mean()
    return hessian_diagonal + DAMPING * mean if mean > 0 else torch.ones_like(hessian_diagonal)


def fit_scales(weight: Tensor, layout: WeightLayout, weights: Tensor) -> Tensor:
    """Scales `[N, G]` in float32 for `weight [N, K]`.

    int8 uses the largest magnitude / 127. int4 tries several candidates, each fitted by least squares to the levels it
    gives. The one with the least `sum of weights[k] * error^2` is used. Scales of groups are rounded to bfloat16, as
    they are stored; groups of zeros get 0."""
    group, count = layout.group or weight.shape[1], layout.num_groups(weight.shape[1])
    padding = (0, count * group - weight.shape[1])
    x = functional.pad(weight, padding).unflatten(1, (count, group))
    if layout.code == "int8":
        scales = x.abs().amax(-1) / 127
        return scales if layout.group is None else _stored(scales)
    weights = functional.pad(weights, padding).unflatten(0, (count, group))
    x, largest = int4.by_largest(x)
    return _stored(int4.fitted_scales(x, STEPS_TO_LARGEST, weights) * largest[..., 0])


def _stored(scales: Tensor) -> Tensor:
    return scales.bfloat16().float()


def round_to_nearest(weight: Tensor, layout: WeightLayout, scales: Tensor) -> QuantizedRows:
    """Rounds every weight to its nearest level, independently of the others."""
    spread = scales.repeat_interleave(layout.group or weight.shape[1], dim=1)[:, : weight.shape[1]]
    levels = (weight / torch.where(spread == 0, 1.0, spread)).round_().clamp_(*LEVELS[layout.code])
    return _rows(layout, levels, scales)


def gptq(
    weight: Tensor, layout: WeightLayout, scales: Tensor, hessian: Tensor, act_order: bool = True
) -> QuantizedRows:
    """Rounds column by column. Columns that are still to come compensate for the error of each column.

    `hessian [K, K]`: float32, any multiple of the sum of x x'.
    `act_order`: rounds the columns with the largest inputs first, since most columns are then left to compensate.

    **Numerics**: Cholesky in float64, the rest in float32. If H is too close to singular, the damping of its diagonal
    is raised tenfold until it is not. Raises ValueError if H is not finite."""
    k = weight.shape[1]
    low, high = LEVELS[layout.code]
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(k)
    feedback = _feedback(hessian[order][:, order], importance(diagonal)[order] - diagonal[order])
    # Transposed, so that a column is contiguous in memory.
    remaining, scales_of = weight.t()[order], scales.t()[order // (layout.group or k)]
    divisors, levels = torch.where(scales_of == 0, 1.0, scales_of), torch.empty_like(remaining)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors, upper = remaining[start:stop], feedback[start:stop, start:]
        for i in range(stop - start):
            column, level = errors[i], levels[start + i]
            torch.div(column, divisors[start + i], out=level).round_().clamp_(low, high)
            column.addcmul_(level, scales_of[start + i], value=-1).div_(upper[i, i])
            errors[i + 1 :].addr_(upper[i, i + 1 : stop - start], column, alpha=-1)
        remaining[stop:].addmm_(upper[:, stop - start :].t(), errors, alpha=-1)
    return _rows(layout, torch.empty_like(levels).index_copy_(0, order, levels).t().contiguous(), scales)


def _feedback(hessian: Tensor, damping: Tensor) -> Tensor:
    """Returns U `[K, K]` in float32, upper triangular, with U' U the inverse of `hessian` + diag(damping).

    `U[i, j] / U[i, i]` is the best compensation in column j > i for an error in column i."""
    if not hessian.isfinite().all():
        raise ValueError("the inputs of a product overflow float32 on this text, so nothing can be fitted to them")
    hessian = hessian.double()
    damping = damping.double()
    identity = torch.eye(len(hessian), dtype=torch.float64)
    while True:
        factor, failed = torch.linalg.cholesky_ex(hessian + torch.diag(damping))
        if not failed:
            inverse, failed = torch.cholesky_solve(identity, factor), 0
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper.float()
        damping = damping * 10


def _rows(layout: WeightLayout, levels: Tensor, scales: Tensor) -> QuantizedRows:
    codes = levels + 8 if layout.code == "int4" else levels
    return QuantizedRows(layout, codes.to(CODES[layout.code]), scales)


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """`tr((Q - W) H (Q - W)')`: the squared error of the products over all inputs."""
    difference = (rounded - weight).double()
    return ((difference @ hessian.double()) * difference).sum().item()
