"""Gates of columns, and norms with a gate, against float64."""

from __future__ import annotations

import pytest
import torch

from pace.ops import native, reference
from tests.ops.isas import on_each_isa

EPS = 2.0**-24
ACTIVATIONS = ("sigmoid", "silu", "softplus", None)


@pytest.mark.parametrize(("columns", "gates"), [(1, 1), (35, 35), (48, 3), (130, 10), (40_000, 1), (64, 32)])
@on_each_isa
def test_gate(columns, gates) -> None:
    for activation in ACTIVATIONS:
        x, gate = torch.randn(3, columns + 2)[:, 1:-1], 20 * torch.randn(3, gates + 1)[:, 1:]
        exact = x.double()
        reference.gate_(exact, gate.double(), activation)
        native.gate_(x, gate, activation)
        # Four roundings of the function, 2 ulp of each of its two exponentials, and the product.
        assert (x - exact).abs().max() <= 16 * EPS * exact.abs().max(), activation
        assert ((x - exact).abs() <= 16 * EPS * exact.abs() + 2.0**-126).all(), activation


def test_a_column_of_a_wide_gate_gives_the_bits_of_a_narrow_one() -> None:
    x, gate = torch.randn(5, 90), torch.randn(5, 9)
    wide = x.clone()
    native.gate_(wide, gate, "silu")
    for g in range(9):
        native.gate_(x[:, 10 * g : 10 * g + 10], gate[:, g : g + 1], "silu")
    assert torch.equal(x, wide)


@pytest.mark.parametrize(("columns", "groups"), [(1, 1), (48, 1), (96, 3), (130, 10), (4096, 32)])
@pytest.mark.parametrize("norm_first", [True, False])
@on_each_isa
def test_gated_norm(columns, groups, norm_first) -> None:
    for activation in ("silu", "sigmoid"):
        for elements in (columns, columns // groups):
            x, gate = torch.randn(7, columns + 3)[:, 2:-1], torch.randn(7, 2 * columns)[:, columns:]
            weight = torch.randn(elements)
            got = native.gated_norm(x, gate, weight, 1e-5, groups, activation, norm_first)
            wanted = reference.gated_norm(x.double(), gate.double(), weight, 1e-5, groups, activation, norm_first)
            # The sum of squares has a relative error of one rounding for each addend of a lane, halved by the root.
            width = columns // groups
            assert ((got - wanted).abs() <= EPS * (width / 2 + 24) * wanted.abs() + 2.0**-126).all()


def test_relu2_of_elements_and_of_products() -> None:
    x = torch.randn(3, 50)
    assert torch.equal(native.activation(x, "relu2"), x.relu().square())
    assert native.activation(torch.tensor([[torch.nan]]), "relu2").isnan().all()
    weight = native.empty_weight(20, 50, torch.float32)
    native.pack_rows_(weight, torch.randn(20, 50), 0)
    assert torch.equal(native.linear(x, weight, activation="relu2"), native.linear(x, weight).relu().square())


def test_what_is_refused() -> None:
    x = torch.zeros(2, 12)
    for message, call in (
        ("G divides the 12 columns of x; got 5", lambda: native.gate_(x, torch.zeros(2, 5))),
        ("x has 2 rows, gate has 3", lambda: native.gate_(x, torch.zeros(3, 4))),
        ("a gate is sigmoid, silu, softplus or None; got 'tanh'", lambda: native.gate_(x, x.clone(), "tanh")),
        ("groups must divide the 12", lambda: native.gated_norm(x, x, torch.ones(12), 1e-5, 5, "silu", True)),
        ("weight must be", lambda: native.gated_norm(x, x, torch.ones(5), 1e-5, 3, "silu", True)),
        ("gate must be", lambda: native.gated_norm(x, x[:, :3], torch.ones(12), 1e-5, 3, "silu", True)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
