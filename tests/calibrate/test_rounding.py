"""Codes and scales: what GPTQ minimises, the effect of fitted scales, and what both leave unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pace.calibrate.rounding import BLOCK, fit_scales, gptq, importance, output_error, round_to_nearest
from pace.ops.weight_layout import WeightLayout

INT4, INT8 = WeightLayout("int4", 32), WeightLayout("int8", None)


def problem(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of correlated inputs, whose channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(k) + 0.3 * torch.randn(k, k, generator=generator)
    x = torch.randn(4 * k, k, generator=generator) @ mixing * (0.1 + 3 * torch.rand(k, generator=generator))
    return torch.randn(n, k, generator=generator), x.t() @ x


def errors(weight: Tensor, hessian: Tensor, layout: WeightLayout) -> list[float]:
    """Errors of the products: rounded to nearest, by GPTQ, and by GPTQ in the order of importance."""
    scales = fit_scales(weight, layout, torch.ones(weight.shape[1]))
    rows = [
        round_to_nearest(weight, layout, scales),
        *(gptq(weight, layout, scales, hessian, act_order) for act_order in (False, True)),
    ]
    assert all(torch.equal(found.scales, scales) and found.order is None for found in rows)
    return [output_error(weight, found.dequantize(), hessian) for found in rows]


@pytest.mark.parametrize("layout", [INT4, WeightLayout("int4", None), WeightLayout("int8", 16), INT8], ids=str)
@pytest.mark.parametrize("k", [64, 3 * BLOCK + 8], ids=["k=64", "k=104"])
def test_gptq_has_less_error_than_rounding(layout, k):
    weight, hessian = problem(48, k)
    nearest, in_order, by_importance = errors(weight, hessian, layout)
    assert in_order < 0.75 * nearest and by_importance < 0.75 * nearest
    assert by_importance < in_order


def test_without_correlation_there_is_nothing_to_make_up():
    weight, _ = problem(16, 64)
    scales = fit_scales(weight, INT4, torch.ones(64))
    assert torch.equal(gptq(weight, INT4, scales, torch.eye(64)).codes, round_to_nearest(weight, INT4, scales).codes)


def test_gptq_is_the_greedy_optimum_column_by_column():
    """Compares with the textbook form in float64, which solves for the remaining columns again after each one."""
    weight, hessian = problem(5, 32)
    scales = fit_scales(weight, INT4, torch.ones(32))
    h = hessian.double() + torch.diag(importance(hessian.diagonal()).double() - hessian.diagonal().double())
    left, levels = weight.double(), torch.empty(5, 32)
    for i in range(32):
        levels[:, i] = (left[:, i] / scales[:, i // 32]).round().clamp(-8, 7)
        error = left[:, i] - levels[:, i] * scales[:, i // 32]
        # The change d of the other columns that minimises the error, for the rounded column i:
        # d_rest = - error * H[i, rest] H[rest, rest]^-1.
        if i < 31:
            left[:, i + 1 :] += torch.outer(error, torch.linalg.solve(h[i + 1 :, i + 1 :], h[i + 1 :, i]))
    assert torch.equal(gptq(weight, INT4, scales, hessian, act_order=False).codes, (levels + 8).to(torch.uint8))


def test_columns_that_were_never_used_keep_their_weights():
    weight, hessian = problem(16, 64)
    hessian[:, 10:20] = hessian[10:20] = 0
    scales = fit_scales(weight, INT4, importance(hessian.diagonal()))
    found, nearest = gptq(weight, INT4, scales, hessian), round_to_nearest(weight, INT4, scales)
    assert torch.equal(found.codes[:, 10:20], nearest.codes[:, 10:20])
    nothing = gptq(weight, INT4, scales, torch.zeros(64, 64))
    assert torch.equal(nothing.codes, nearest.codes)


def test_a_hessian_of_few_tokens_is_damped():
    """The rank is 3 of 64, so there is no inverse without damping."""
    weight, _ = problem(16, 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5)) * 1e4
    hessian = x.t() @ x
    scales = fit_scales(weight, INT4, importance(hessian.diagonal()))
    found = gptq(weight, INT4, scales, hessian)
    assert output_error(weight, found.dequantize(), hessian) < 0.2 * output_error(
        weight, round_to_nearest(weight, INT4, scales).dequantize(), hessian
    )


@pytest.mark.parametrize(
    "layout", [INT4, WeightLayout("int4", 48), WeightLayout("int4", None), INT8, WeightLayout("int8", 32)], ids=str
)
def test_rounding_is_within_half_a_step(layout):
    weight, _ = problem(20, 104)
    weight[3] = 0
    weight[4, 40:70] = 0
    scales = fit_scales(weight, layout, torch.ones(104))
    rows = round_to_nearest(weight, layout, scales)
    step = scales.abs().repeat_interleave(layout.group or 104, 1)[:, :104]
    off = (rows.dequantize() - weight).abs()
    inside = (weight / torch.where(step == 0, 1.0, step)).abs() < (7 if layout.code == "int4" else 127)
    assert (off[inside] <= 0.501 * step[inside]).all() and inside.float().mean() > 0.9
    assert not rows.dequantize()[3].any()
    assert torch.equal(scales, scales.bfloat16().float()) or layout.group is None, "group scales are stored in bfloat16"


def test_scales_look_at_what_counts():
    """In each group one column counts a thousand times as much as the others. Its weights are rounded more accurately
    than with equal importance."""
    weight, _ = problem(64, 64)
    weights = torch.ones(64)
    weights[::32] = 1000
    fitted, plain = (
        round_to_nearest(weight, INT4, fit_scales(weight, INT4, w)).dequantize() - weight
        for w in (weights, torch.ones(64))
    )
    assert fitted[:, ::32].square().sum() < 0.6 * plain[:, ::32].square().sum()
    assert fitted.square().sum() > plain.square().sum()


def test_output_error_is_that_of_the_products():
    weight, _ = problem(8, 16)
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(1))
    rounded = weight + 0.1
    assert output_error(weight, rounded, x.t() @ x) == pytest.approx(
        (x @ rounded.t() - x @ weight.t()).square().sum().item(), rel=1e-4
    )


def test_inputs_that_overflow_are_refused():
    hessian = torch.eye(32)
    hessian[3, 4] = float("nan")
    layout = WeightLayout("int4", 16)
    with pytest.raises(ValueError, match="overflow float32"):
        gptq(torch.randn(4, 32), layout, torch.ones(4, 2), hessian)
