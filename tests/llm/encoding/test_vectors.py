"""Vectors of pooled rows, against torch and by equal bits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pace.llm.encoding.pooling import Finish, dense_of, make_layers, unit_rows
from pace.llm.encoding.settings import DenseSettings, Normalise
from pace.ops import native, reference
from tests.llm.encoding.checkpoints import write_dense

TOLERANCE = 4e-7
"""A few units in the last place of float32, for sums of 48 products of order 1 in another order, divided by the row's
length."""
ACTIVATIONS = {
    None: lambda x: x,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


@pytest.fixture
def rows():
    return torch.randn(7, 48, generator=torch.Generator().manual_seed(1))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) / shape[-1] ** 0.5


def test_dense_layers_follow_their_settings(tmp_path, rows):
    for ops in (native, reference):
        for number, (activation, expected) in enumerate(ACTIVATIONS.items()):
            for n, residual, bias in [(20, False, True), (48, True, False), (20, True, True)]:
                folder = tmp_path / f"{number}-{n}-{residual}"
                tensors = {"linear.weight": random(n, 48)}
                if bias:
                    tensors["linear.bias"] = random(n)
                if residual and n != 48:
                    tensors["residual.weight"] = random(n, 48) * 2
                write_dense(folder, tensors)
                settings = DenseSettings(folder, 48, n, bias, activation, residual)
                (dense,) = make_layers(ops, 48, [settings])
                wanted = expected(functional.linear(rows, tensors["linear.weight"], tensors.get("linear.bias")))
                if residual:
                    wanted = wanted + (rows if n == 48 else functional.linear(rows, tensors["residual.weight"]))
                found = dense(ops, rows)
                assert (found - wanted).abs().max() < 8 * TOLERANCE, settings
                alone = torch.cat([dense(ops, row[None]) for row in rows])
                assert ops is reference or torch.equal(alone, found)


def test_vectors_are_cut_and_have_length_1_again(rows):
    unit = functional.normalize(rows, dim=1)
    finish = Finish(native, 48, [None])
    assert (finish.size, finish.default_size, finish.normalises) == (48, 48, True)
    assert (finish(rows) - unit).abs().max() < TOLERANCE
    assert (finish(rows, 5) - functional.normalize(rows[:, :5], dim=1)).abs().max() < TOLERANCE
    assert torch.equal(finish(rows, 5, normalise=False), rows[:, :5])
    assert torch.equal(torch.cat([finish(row[None], 5) for row in rows]), finish(rows, 5))
    plain = Finish(native, 48, [], default_size=9)
    assert plain.default_size == 9 and not plain.normalises
    assert torch.equal(plain(rows), rows[:, :9]) and torch.equal(plain(rows, 48), rows)
    assert (plain(rows, normalise=True) - functional.normalize(rows[:, :9], dim=1)).abs().max() < TOLERANCE
    between = Finish(native, 48, [None, dense_of(native, random(20, 48))])
    assert not between.normalises and between.size == 20
    assert (between(rows) - functional.linear(unit, random(20, 48))).abs().max() < TOLERANCE


def test_short_rows_and_no_rows():
    assert torch.equal(unit_rows(native, torch.zeros(1, 8)), torch.zeros(1, 8))
    assert unit_rows(native, torch.full((1, 8), 1e-3)).norm().item() == pytest.approx(1, abs=1e-6)
    assert Finish(native, 8, [None])(torch.empty(0, 8), 4).shape == (0, 4)


def test_a_dense_that_does_not_fit_is_refused(tmp_path):
    settings = DenseSettings(tmp_path, 48, 20, True, None, False)
    for message, size, tensors in [
        ("in_features is 48, but the rows before have 32", 32, {"linear.weight": random(20, 48)}),
        ("asks for 2 tensors .linear.bias, linear.weight., but the file has", 48, {"linear.weight": random(20, 48)}),
        ("linear.weight is torch.float32 .48, 20.", 48, {"linear.weight": random(48, 20), "linear.bias": random(20)}),
        ("linear.bias is torch.int64", 48, {"linear.weight": random(20, 48), "linear.bias": torch.ones(20).long()}),
    ]:
        write_dense(tmp_path, tensors)
        with pytest.raises(ValueError, match=message):
            make_layers(native, size, [settings])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        make_layers(native, 48, [settings])
    assert make_layers(native, 48, [Normalise()]) == [None]
