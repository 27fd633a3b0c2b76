"""Routing and stacks of experts: native against the specification, and rows independent of each other."""

from __future__ import annotations

import itertools

import pytest
import torch

from pace import _C
from pace.ops import native, reference
from pace.ops.experts import SCORES, ClampedSwiglu, Router
from pace.ops.protocol import ExpertOptions
from pace.quant import read_format

ROUTERS = {
    "softmax": Router(16, 4),
    "normalised": Router(16, 4, normalise=True, scale=2.5),
    "at least": Router(16, 4, normalise=True, least_sum=1e-12),
    "at least so much": Router(16, 4, normalise=True, least_sum=0.9),
    "so much more": Router(16, 4, normalise=True, eps=0.25),
    "chosen": Router(16, 4, "softmax_of_chosen"),
    "sigmoid": Router(16, 4, "sigmoid", normalise=True, eps=1e-20),
    "groups by maximum": Router(16, 4, groups=4, kept_groups=2),
    "groups by two": Router(16, 4, "sigmoid", groups=4, kept_groups=2, group_score="top2", normalise=True),
    "one of many": Router(300, 1, "sigmoid"),
    "all": Router(3, 3),
    "sparsemixer": Router(16, 2, "sparsemixer", jitter=0.01),
    "sigmoid of chosen": Router(16, 3, "sigmoid_of_chosen"),
}
BIASED = ("sigmoid", "groups by two", "at least")


def logits_for(router, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, router.num_experts, generator=generator) * 2


def bias_for(router, name):
    return torch.linspace(-0.4, 0.4, router.num_experts).flip(0) if name in BIASED else None


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_are_those_of_the_specification(name):
    router = ROUTERS[name]
    for rows in (1, 2, 5, 700):
        logits, bias = logits_for(router, rows), bias_for(router, name)
        found = native.route(logits, router, bias)
        exact = reference.route(logits.double(), router, bias)
        k = router.top_k
        assert torch.equal(found[:, :k].double(), exact[:, :k]), rows
        torch.testing.assert_close(found[:, k:].double(), exact[:, k:], rtol=2e-6, atol=1e-9)
        assert (found[:, :k].diff(dim=1) > 0).all(), rows


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_factor_of_each_expert_multiplies_the_weights_at_the_end(ops, name):
    router = ROUTERS[name]
    factors, k = torch.linspace(-1.0, 2.0, router.num_experts), router.top_k
    logits, bias = logits_for(router, 5), bias_for(router, name)
    plain = ops.route(logits, router, bias)
    scaled = ops.route(logits, router, bias, factors)
    assert torch.equal(scaled, torch.cat([plain[:, :k], plain[:, k:] * factors[plain[:, :k].long()]], 1))


def test_scores_are_listed_as_c_counts_them():
    assert SCORES == ("softmax", "sigmoid", "softmax_of_chosen", "sparsemixer", "sigmoid_of_chosen")


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
def test_equals_go_to_the_lower_number(ops):
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    for score in ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"):
        assert ops.route(logits, Router(6, 3, score))[0, :3].tolist() == [1, 2, 3]
    # groups of two: the first two have the best expert each
    assert ops.route(torch.tensor([[3.0, 0, 3, 1, 3, 2]]), Router(6, 2, groups=3, kept_groups=1))[0, :2].tolist() == [
        0,
        1,
    ]


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
def test_sigmoids_that_round_to_one_are_told_apart_by_their_logits(ops):
    logits = torch.tensor([[20.0, 30.0, -1.0]])
    assert ops.route(logits, Router(3, 1, "sigmoid_of_chosen")).tolist() == [[1.0, 1.0]]
    assert ops.route(logits, Router(3, 1, "sigmoid")).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
def test_a_biased_choice_has_unbiased_weights(ops):
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 0.0, 1.0])
    routing = ops.route(logits, Router(4, 1, "sigmoid"), bias)
    assert routing.tolist() == [[3.0, 0.5]]


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
def test_negative_biased_scores_of_kept_groups_beat_those_that_are_lost(ops):
    bias = torch.tensor([-2.0, -2, -9, -9])
    routing = ops.route(torch.zeros(1, 4), Router(4, 2, "sigmoid", groups=2, kept_groups=1), bias)
    assert routing[0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_of_nan_chooses_the_first_and_spoils_itself_alone(ops, name):
    router = ROUTERS[name]
    logits = logits_for(router, 3)
    alone = ops.route(logits[:1], router)
    logits[1, -1] = torch.nan
    routing, k = ops.route(logits, router), router.top_k
    assert routing[1, :k].tolist() == list(range(k)) and routing[1, k:].isnan().all()
    assert torch.equal(routing[0], alone[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 0},
        {"top_k": 0},
        {"top_k": 9},
        {"score": "loudest"},
        {"groups": 3},
        {"groups": 4, "kept_groups": 5},
        {"groups": 4, "kept_groups": 1, "top_k": 3},
        {"groups": 8, "kept_groups": 8, "group_score": "top2"},
        {"group_score": "mean"},
        {"score": "sparsemixer", "top_k": 3},
        {"scale": float("nan")},
    ],
)
def test_routers_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValueError):
        Router(**{"num_experts": 8, "top_k": 2} | fields)


# -- products


def stacks(ops, count, hidden, inner, layout=torch.float32, seed=1, gated=True):
    """A stack of gate and up, or of up alone, and one of down, whose weights depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for n, k, glu in ((2 * inner if gated else inner, hidden, gated), (hidden, inner, False)):
        stack = ops.empty_stack(count, n, k, getattr(layout, "layout", layout), glu)
        for expert in stack.experts:
            rows = torch.randn(n, k, generator=generator) / k**0.5
            if isinstance(layout, torch.dtype):
                ops.pack_rows_(expert, rows, 0)
            else:
                ops.pack_quantized_(expert, ops.quantize(rows, layout), 0)
        made.append(stack)
    return made


def biases(count, hidden, inner):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(count, n, generator=generator) for n in (2 * inner, hidden)]


SILU = ExpertOptions("silu")
LAYOUTS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    **{name: read_format(name) for name in ("int8", "int4", "mxfp4", "fp8")},
}
SIZES = [(6, 64, 32), (5, 33, 18), (40, 96, 160)]


@pytest.mark.parametrize("layout", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_are_those_of_the_specification(layout, sizes):
    count, hidden, inner = sizes
    ours, theirs = (stacks(ops, *sizes, LAYOUTS[layout]) for ops in (native, reference))
    router = Router(count, 3, normalise=True)
    gate_up_bias, down_bias = biases(count, hidden, inner)
    # bf16 products round their inputs on some instruction sets: an error of 2^-9 each, in two products.
    tolerance = 2e-2 if layout == "bfloat16" else 1e-5
    kinds = list(itertools.product(("silu", ClampedSwiglu(1.702, 0.5)), (False, True), (False, True)))
    for rows in (1, 3, 4, 5, 16, 17, 90):
        x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows))
        residual = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows + 1))
        routing = native.route(logits_for(router, rows), router)
        for activation, bias, weigh_inputs in kinds:
            more = {"gate_up_bias": gate_up_bias, "down_bias": down_bias} if bias else {}
            more["weigh_inputs"] = weigh_inputs
            found = native.experts(x, *ours, routing, ExpertOptions(activation, **more), residual=residual)
            exact = reference.experts(
                x.double(), *theirs, routing, ExpertOptions(activation, **more), residual=residual.double()
            )
            error = (found.double() - exact).norm()
            assert error <= tolerance * exact.norm(), (rows, activation, bias, weigh_inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_is_the_products_of_one_expert(layout):
    """One expert with weight 1 gives the bits of `linear_glu` and `linear`, in every layout. Their products are tested
    elsewhere."""
    sizes = (4, 256, 128)
    gate_up, down = stacks(native, *sizes, LAYOUTS[layout])
    for rows in (1, 7, 40):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        expert = torch.arange(rows) % 4
        routing = torch.stack([expert.float(), torch.ones(rows)], 1)
        found = native.experts(x, gate_up, down, routing, SILU)
        for e in range(4):
            chosen = x[expert == e]
            alone = native.linear(native.linear_glu(chosen, gate_up.experts[e], "silu"), down.experts[e])
            assert torch.equal(found[expert == e], alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_without_a_gate_is_two_products(layout):
    """One expert has the bits of `linear` with an activation, then `linear`."""
    up, down = stacks(native, 4, 256, 112, LAYOUTS[layout], gated=False)
    up_bias, down_bias = (torch.randn(4, n, generator=torch.Generator().manual_seed(5)) for n in (112, 256))
    for rows in (1, 7, 40):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        expert = torch.arange(rows) % 4
        routing = torch.stack([expert.float(), torch.ones(rows)], 1)
        found = native.experts(x, up, down, routing, ExpertOptions("relu2", up_bias, down_bias))
        for e in range(4):
            hidden = native.linear(x[expert == e], up.experts[e], up_bias[e], "relu2")
            assert torch.equal(found[expert == e], native.linear(hidden, down.experts[e], down_bias[e])), (rows, e)


def test_experts_without_gates_are_those_of_the_specification():
    sizes = (6, 64, 48)
    ours, theirs = (stacks(ops, *sizes, gated=False) for ops in (native, reference))
    for rows, weigh_inputs in itertools.product((1, 5, 90), (False, True)):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        router, options = Router(6, 3, normalise=True), ExpertOptions("relu2", weigh_inputs=weigh_inputs)
        routing = native.route(logits_for(router, rows), router)
        exact = reference.experts(x.double(), *theirs, routing, options, residual=x.double())
        error = (native.experts(x, *ours, routing, options, residual=x).double() - exact).norm()
        assert error <= 1e-5 * exact.norm(), (rows, weigh_inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_the_same_bits_whoever_is_beside_it(layout):
    count, hidden, inner = 12, 256, 128
    gate_up, down = stacks(native, count, hidden, inner, LAYOUTS[layout])
    router = Router(count, 4, normalise=True)
    x = torch.randn(300, hidden, generator=torch.Generator().manual_seed(3))
    routing = native.route(logits_for(router, 300), router)
    _C.set_num_threads(1)
    together = native.experts(x, gate_up, down, routing, SILU, residual=x)
    for threads in (1, 2, 3, 8):
        _C.set_num_threads(threads)
        assert torch.equal(native.experts(x, gate_up, down, routing, SILU, residual=x), together), threads
        for start, rows in ((0, 1), (7, 2), (11, 4), (20, 5), (40, 16), (60, 17), (100, 150)):
            part = slice(start, start + rows)
            alone = native.experts(x[part], gate_up, down, routing[part], SILU, residual=x[part].contiguous())
            assert torch.equal(alone, together[part]), (threads, start, rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_inputs_are_those_of_rows_times_a_power_of_two(layout):
    """A power of two causes no rounding in any layout."""
    gate_up, down = stacks(native, 4, 256, 128, LAYOUTS[layout])
    for rows in (1, 7, 40):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        routing = torch.tensor([[1.0, 3.0, 0.25, 0.25]]).repeat(rows, 1)
        once = torch.tensor([[1.0, 3.0, 1.0, 1.0]]).repeat(rows, 1)
        found = native.experts(x, gate_up, down, routing, ExpertOptions("silu", weigh_inputs=True), residual=x)
        assert torch.equal(found, native.experts(x / 4, gate_up, down, once, SILU, residual=x)), rows


@pytest.mark.parametrize("rows", [1, 4, 9, 64])
def test_an_expert_that_nobody_chose_is_not_read(rows):
    gate_up, down = stacks(native, 6, 64, 32)
    for stack in (gate_up, down):
        native.pack_rows_(stack.experts[2], torch.full((stack.n, stack.k), torch.nan), 0)
    x = torch.randn(rows, 64)
    routing = torch.tensor([[1.0, 4.0, 0.5, 0.5]]).repeat(rows, 1)
    assert native.experts(x, gate_up, down, routing, SILU).isfinite().all()


@pytest.mark.parametrize("rows", [2, 40, 400])
def test_all_rows_may_choose_one_expert_or_none_the_same(rows):
    sizes = (40, 64, 32)
    x = torch.randn(rows, 64)
    for chosen in (torch.full((rows, 1), 7.0), (torch.arange(rows) % 40)[:, None].float()):
        routing = torch.cat([chosen, torch.full((rows, 1), 0.5)], 1)
        found = native.experts(x, *stacks(native, *sizes), routing, SILU)
        exact = reference.experts(x.double(), *stacks(reference, *sizes), routing, SILU)
        assert (found.double() - exact).norm() <= 1e-5 * exact.norm()


def test_no_rows_give_no_rows():
    gate_up, down = stacks(native, 6, 64, 32)
    assert native.experts(torch.empty(0, 64), gate_up, down, torch.empty(0, 4), SILU).shape == (0, 64)
    assert native.route(torch.empty(0, 6), Router(6, 2)).shape == (0, 4)


@pytest.mark.parametrize(
    "routing",
    [
        [[6.0, 1.0]],
        [[-1.0, 1.0]],
        [[0.5, 1.0]],
        [[torch.nan, 1.0]],
        [[1.0, 1.0, 0.5, 0.5]],
        [[2.0, 1.0, 0.5, 0.5]],
        [[1.0]],
    ],
    ids=str,
)
def test_a_routing_that_no_router_makes_is_refused(routing):
    gate_up, down = stacks(native, 6, 64, 32)
    with pytest.raises(ValueError, match="routing"):
        native.experts(torch.randn(1, 64), gate_up, down, torch.tensor(routing), SILU)


def test_stacks_that_do_not_fit_are_refused():
    gate_up, down = stacks(native, 6, 64, 32)
    x, routing = torch.randn(1, 64), torch.tensor([[1.0, 1.0]])
    for wrong in ((down, gate_up), (gate_up, gate_up), (gate_up, stacks(native, 5, 64, 32)[1])):
        with pytest.raises(ValueError, match="expert"):
            native.experts(x, *wrong, routing, SILU)
    with pytest.raises(ValueError, match="experts without gates"):
        native.experts(x, *stacks(native, 6, 64, 32, gated=False), routing, ExpertOptions(ClampedSwiglu(1.0, 1.0)))
    with pytest.raises(ValueError, match="x must be"):
        native.experts(x[:, :32], gate_up, down, routing, SILU)
    with pytest.raises(ValueError, match="residual"):
        native.experts(x, gate_up, down, routing, SILU, residual=x[:, :32])
    with pytest.raises(ValueError, match="bias"):
        native.experts(x, gate_up, down, routing, ExpertOptions("silu", down_bias=torch.zeros(6, 63)))


def test_a_gate_opens_rows():
    for ops in (native, reference):
        x, gate = torch.randn(70, 40), torch.randn(70, 3)[:, 1:2]
        expected = x * gate.sigmoid()
        ops.gate_(x, gate)
        torch.testing.assert_close(x, expected)
