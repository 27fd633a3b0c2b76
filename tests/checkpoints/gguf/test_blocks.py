"""ggml's block types: their decoded values, against those of the gguf package."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from pace.checkpoints.gguf.blocks import BLOCK_TYPES, OTHER_TYPES, WIDE_Q2_0  # noqa: E402
from pace.ops.blocks import BlockRows, BlockType  # noqa: E402
from pace.ops.weight import empty_weight, pack_quantized_, unpack, weight_nbytes  # noqa: E402
from pace.ops.weight_layout import GRIDS  # noqa: E402
from tests.checkpoints.gguf.files import HALVES, random_blocks  # noqa: E402
from tests.quant import ternary_types  # noqa: E402

NUMBERS = pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: BLOCK_TYPES[number].name)


def gguf_values(raw, number):
    if number in ternary_types.SIZES:
        return torch.from_numpy(ternary_types.dequantize(raw, number))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.array(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))))


def assert_same(rows, expected):
    """Asserts that finite values are equal bit for bit."""
    values = rows.dequantize()
    assert values.shape == expected.shape
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(values), finite) and finite.any()
    assert torch.equal(values[finite], expected[finite])


@NUMBERS
def test_any_bytes(number):
    """Random blocks: all codes, all scales, NaN and infinite ones too."""
    kind = BLOCK_TYPES[number]
    raw = np.random.default_rng(number).integers(0, 256, (50, 3 * kind.nbytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        raw[:, :: kind.nbytes] %= 255  # 255 is NaN in the standard, but 2^128 in the gguf package
    assert_same(BlockRows(kind, torch.from_numpy(raw)).unpack(), gguf_values(raw, number))


@NUMBERS
def test_quantised_weights(number):
    """Weights quantised by the gguf package if it can, otherwise random blocks of ordinary sizes."""
    kind = BLOCK_TYPES[number]
    raw = gguf_blocks(number, (33, 512), number)
    rows = BlockRows(kind, torch.from_numpy(raw)).unpack()
    assert_same(rows, gguf_values(raw, number))
    assert 0.03 < rows.dequantize().std() < 0.08 or number in (34, 35, 42), "most become zero in three levels"
    piece = BlockRows(kind, torch.from_numpy(raw[7:9])).unpack()
    assert torch.equal(piece.dequantize(), rows.dequantize()[7:9]), "rows do not know of their neighbours"


@NUMBERS
def test_zero_blocks_are_zero(number):
    kind = BLOCK_TYPES[number]
    zeros = torch.zeros(4, 2 * kind.nbytes, dtype=torch.uint8)
    expected = torch.zeros(4, 2 * kind.weights)  # also equal to -0
    if kind.name == "MXFP4":
        zeros[:, 0] = 127  # a scale of 1, codes of 0
    assert torch.equal(BlockRows(kind, zeros).dequantize(), expected)


def test_the_exponents_of_mxfp4():
    """Every possible scale; the smallest are denormal. 255 is NaN, which spoils only its block."""
    raw = torch.zeros(1, 256 * 17, dtype=torch.uint8).view(256, 17)
    raw[:, 0], raw[:, 1:] = torch.arange(256), 0x21  # 0.5 and 1
    values = BlockRows(BLOCK_TYPES[39], raw.view(1, -1)).unpack().dequantize().view(256, 32)
    expected = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)], dtype=torch.float64)
    assert torch.equal(values[:255, 31].double(), expected) and torch.equal(values[:255, 0].double(), expected / 2)
    assert values[255].isnan().all()


@NUMBERS
@pytest.mark.parametrize("glu", [False, True])
def test_blocks_pack_as_the_codes_and_scales_that_they_hold(number, glu):
    """Blocks come in pieces that begin and end anywhere, and from rows that are not contiguous."""
    kind = BLOCK_TYPES[number]
    n, k = 70, 3 * 256
    raw = random_rows(kind, n, k)
    rows = BlockRows(kind, torch.cat([raw, raw], dim=1)[:, : raw.shape[1]])
    whole, pieces = (empty_weight(n, k, kind.layout, glu) for _ in range(2))
    pack_quantized_(whole, rows if kind.layout.code in GRIDS else rows.unpack(), 0)
    for start, stop in ((0, 1), (1, 16), (16, 37), (37, n)):
        pack_quantized_(pieces, rows.take(slice(start, stop)), start)
    assert torch.equal(unpack(pieces), unpack(whole))
    if kind.layout.in_super_blocks:
        assert torch.equal(unpack(whole), rows.dequantize())
    assert torch.equal(pieces._buffer[: pieces.nbytes], whole._buffer[: whole.nbytes])


def random_rows(kind: BlockType, n: int, k: int) -> torch.Tensor:
    """uint8 `[n, row_bytes]` of weights of usual sizes."""
    return torch.from_numpy(gguf_blocks(kind.number, (n, k), 1))


def gguf_blocks(number: int, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Blocks of normal weights, or random ones of a type that the package does not write."""
    weights = np.random.default_rng(number).normal(0, 0.05, shape).astype(np.float32)
    if number in ternary_types.SIZES:
        return ternary_types.quantize(weights, number)
    name = gguf.GGMLQuantizationType(number)
    return random_blocks(shape, name, 0.05, seed) if name in HALVES else gguf.quants.quantize(weights, name)


def test_blocks_that_cannot_be_packed_are_refused():
    kind = BLOCK_TYPES[12]
    rows = BlockRows(kind, random_rows(kind, 4, 512), "the tensor x")
    other = empty_weight(4, 512, BLOCK_TYPES[14].layout)
    with pytest.raises(ValueError, match="cannot write rows of int4"):
        pack_quantized_(other, rows, 0)
    with pytest.raises(ValueError, match="does not hold what these blocks do"):
        rows.pack(other.address, 0)
    grid = BLOCK_TYPES[16]
    with pytest.raises(ValueError, match="iq2_xxs weights are packed from the blocks of a file"):
        unpacked = BlockRows(grid, random_rows(grid, 4, 512)).unpack()
        pack_quantized_(empty_weight(4, 512, grid.layout), unpacked, 0)
    with pytest.raises(ValueError, match="must be contiguous"):
        BlockRows(kind, rows.data.T.contiguous().T).unpack()
    rows.data[2, 144:146] = 255  # NaN
    for use in (rows.dequantize, lambda: pack_quantized_(empty_weight(4, 512, kind.layout), rows, 0)):
        with pytest.raises(ValueError, match="the tensor x has scales that are NaN or infinite"):
            use()


def test_the_page_tells_the_sizes_that_are():
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text(encoding="utf-8")
    for kind in BLOCK_TYPES.values():
        here = 8 * weight_nbytes(4096, 4096, kind.layout) / 4096**2
        there = 8 * kind.nbytes / kind.weights
        assert here <= 1.04 * there or kind.name in ("MXFP4", "NVFP4", "TQ1_0")
        assert f"| `{kind.name}` | {there:.2f} | {kind.layout} | {here:.2f} |\n" in page, kind.name


def test_the_table():
    """Sizes, names and numbers are ggml's. Every type of the gguf package is decoded, a float, or refused by name."""
    for number, kind in BLOCK_TYPES.items():
        name = ternary_types.kind_of(kind.name)
        assert number == name
        assert (kind.name, (kind.weights, kind.nbytes)) == (name.name, gguf.GGML_QUANT_SIZES[name])
        assert kind.row_bytes(3 * kind.weights) == 3 * kind.nbytes
        with pytest.raises(ValueError, match=f"{kind.weights + 1} weights .* {kind.name} blocks of {kind.weights}"):
            kind.row_bytes(kind.weights + 1)
    others = {"F32", "F16", "BF16", "F64", "I64"}
    for name in gguf.GGMLQuantizationType:
        assert (name in BLOCK_TYPES) + (name in OTHER_TYPES) + (name.name in others) == 1, name
        assert name not in OTHER_TYPES or OTHER_TYPES[name] == name.name


def test_q2_0_in_blocks_of_128():
    """What PrismML's fork wrote under the number of Q2_0: one scale for two of its blocks."""
    narrow = gguf_blocks(42, (5, 256), 0).reshape(5, 2, 2, 18)
    narrow[:, :, 1, :2] = narrow[:, :, 0, :2]
    wide = np.concatenate([narrow[:, :, 0], narrow[:, :, 1, 2:]], axis=-1).reshape(5, -1)
    rows = BlockRows(WIDE_Q2_0, torch.from_numpy(wide)).unpack()
    assert rows.layout.group == 128 and torch.equal(rows.dequantize(), gguf_values(narrow.reshape(5, -1), 42))
