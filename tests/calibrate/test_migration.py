"""Scales that move from channels to columns make the rounded products more accurate. A visit of each variant
(tests/llm/models/visit.py) checks that the float model does not change."""

from __future__ import annotations

import pytest
import torch

from pace.calibrate.migration import KINDS, centred, choose, migrations, quantised_inputs
from pace.calibrate.recording import InputStatistics
from pace.calibrate.rounding import fit_scales, round_to_nearest
from pace.llm.loading.load import load_model as load_layers
from pace.llm.loading.options import LoadOptions
from pace.ops.weight_layout import WeightLayout
from tests.llm.models.variants import save_tiny

pytest.importorskip("transformers")


def test_scales_of_values_are_shared_by_the_query_heads_that_read_them(tmp_path):
    save_tiny(tmp_path, "llama", {})  # four query heads on two key heads, of eight elements
    model = load_layers(LoadOptions(tmp_path, dtype="float32", backend="torch", progress=False))
    values = list(migrations(model.layers[0]))[2]
    s = torch.exp(torch.randn(32, generator=torch.Generator().manual_seed(0)))
    heads = values.channels(s).view(2, 2, 8)
    assert torch.equal(heads[:, 0], heads[:, 1])
    assert torch.allclose(heads[1, 0], (s[16:24] * s[24:32]).sqrt())


def statistics(x: torch.Tensor) -> InputStatistics:
    found = InputStatistics(x.shape[1], len(x), with_hessian=True)
    for piece in x.split(37):
        found.add(piece)
    return found


def test_statistics_are_those_of_all_inputs():
    x = torch.randn(1100, 6, generator=torch.Generator().manual_seed(0))
    found = statistics(x)
    assert torch.allclose(found.hessian, x.t() @ x, rtol=1e-4, atol=1e-3) and found.count == 1100
    assert torch.allclose(found.squares, x.square().sum(0)) and torch.allclose(found.magnitudes, x.abs().sum(0))
    assert torch.equal(found.largest, x.abs().amax(0)) and torch.equal(found.samples, x[::3])
    factors = torch.rand(6) + 0.5
    found.rescale(factors)
    scaled = statistics(x * factors)
    for name in ("hessian", "squares", "magnitudes", "largest", "samples"):
        assert torch.allclose(getattr(found, name), getattr(scaled, name), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "layout", "share"),
    [("awq", WeightLayout("int4", 64), 0.9), ("smoothquant", WeightLayout("int8", None), 0.5)],
    ids=["awq", "smoothquant"],
)
def test_outlier_channels_are_migrated(kind, layout, share, tmp_path):
    """One channel in 32 is fifty times as large as the others. With scales, the rounded products have less error on
    new inputs than without."""
    save_tiny(tmp_path, "llama", {"hidden_size": 64, "num_attention_heads": 4})
    layer = load_layers(LoadOptions(tmp_path, dtype="float32", backend="torch", progress=False)).layers[0]
    place = next(migrations(layer))
    [reader] = place.readers
    generator = torch.Generator().manual_seed(0)
    sizes = torch.ones(64)
    sizes[5::32] = 50.0
    x, unseen = (torch.randn(500, 64, generator=generator) * sizes for _ in range(2))

    def error(s: torch.Tensor) -> float:
        weight = reader.weight.matrix
        rounded = round_to_nearest(weight * s, layout, fit_scales(weight * s, layout, torch.ones(64))).dequantize()
        return (quantised_inputs(unseen / s, layout) @ rounded.t() - unseen @ weight.t()).square().sum().item()

    s = choose(place, kind, statistics(x), [[(slice(0, reader.n), layout)]])
    assert error(s) < share * error(torch.ones(64))
    assert s[5] > 2 * s[6], "large inputs are divided"


def test_nothing_is_migrated_where_nothing_is_rounded(tmp_path):
    save_tiny(tmp_path, "llama", {})
    layer = load_layers(LoadOptions(tmp_path, dtype="float32", backend="torch", progress=False)).layers[0]
    assert choose(next(migrations(layer)), "awq", statistics(torch.randn(50, 32)), [[]]) is None


def test_scales_are_centred_and_bounded():
    assert torch.equal(centred(torch.tensor([0.0, 0.0])), torch.ones(2))
    assert torch.allclose(centred(torch.tensor([4.0, 0.0, 1.0])), torch.tensor([2.0, 1.0, 0.5]))
    assert centred(torch.tensor([1e-30, 1.0])).tolist() == pytest.approx([1e-3, 1e3])
    assert set(KINDS) == {"awq", "smoothquant"}


@pytest.mark.parametrize("group", [None, 32, 128])
def test_inputs_are_quantised_as_the_kernels_do(group):
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    found = quantised_inputs(x, WeightLayout("int8", group))
    size = group or 128
    for start in range(0, 200, size):
        part = x[:, start : start + size]
        scale = part.abs().amax(1, keepdim=True) / 127
        assert ((found[:, start : start + size] - part).abs() <= scale / 2 * 1.001).all()
    assert not found[1].any() and not torch.equal(found, x)
