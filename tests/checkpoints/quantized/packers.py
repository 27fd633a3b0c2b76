"""Quantised matrices packed element by element in the published layouts, and the weights that they represent.

Every function returns `(tensors, weight)`: a checkpoint's tensors for a module `m`, and float64 `[N, K]`. The numbers
are random, of size about 0.2 as in a small model."""

from __future__ import annotations

import json
import math
import random

import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def bitnet(n: int, k: int) -> Packed:
    """Four rows in a byte: n must be a multiple of four."""
    levels = [[random.choice((-1, 0, 1)) for _ in range(k)] for _ in range(n)]
    scale = torch.tensor([random.choice((4.0, 6.5))], dtype=torch.bfloat16)
    packed = [[sum(levels[i + j * n // 4][c] + 1 << 2 * j for j in range(4)) for c in range(k)] for i in range(n // 4)]
    weight = torch.tensor(levels, dtype=torch.float64) / scale.double()
    return {"m.weight": torch.tensor(packed, dtype=torch.uint8), "m.weight_scale": scale}, weight


def words(values: list[int], bits: int, count: int | None = None) -> list[int]:
    """Packs fields of `bits` bits one after another, starting at the lowest bit of the first 32-bit word.

    Returns signed words."""
    stream = 0
    for i, value in enumerate(values):
        assert 0 <= value < 1 << bits
        stream |= value << (i * bits)
    count = -(-len(values) * bits // 32) if count is None else count
    return [signed(stream >> (32 * i) & 0xFFFFFFFF) for i in range(count)]


def spaced_words(values: list[int], bits: int) -> list[int]:
    """Packs like `words`, but no field crosses a word."""
    each = 32 // bits
    return [
        signed(sum(value << (i * bits) for i, value in enumerate(values[start : start + each])))
        for start in range(0, len(values), each)
    ]


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def integers(n: int, k: int, bits: int) -> list[list[int]]:
    """Random codes, with the largest and the smallest in the first row, and all codes if there is room."""
    rows = [random.choices(range(1 << bits), k=k) for _ in range(n)]
    rows[0][0], rows[0][-1] = 0, (1 << bits) - 1
    return rows


def scales(n: int, groups: int, bits: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return ((torch.rand(n, groups) + 0.5) * 0.6 / 2**bits).to(dtype)


def values(codes: list[list[int]], zeros: list[list[int]], scale: Tensor, group_of: list[int]) -> Tensor:
    scale = scale.double().tolist()
    rows = [
        [(code - zero[group]) * factor[group] for code, group in zip(row, group_of, strict=True)]
        for row, zero, factor in zip(codes, zeros, scale, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def columns(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def groups_of(k: int, group: int, order: str) -> list[int]:
    """The group of each column: "sequential", "act-order" (shuffled), or "irregular" (shuffled, of different sizes)."""
    found = [column // group for column in range(k)]
    if order == "irregular":
        found = [random.randrange(max(found) + 1) for _ in range(k)]
    if order != "sequential":
        random.shuffle(found)
    return found


def gptq(
    n: int, k: int, bits: int, group: int = -1, symmetric: bool = True, order: str = "sequential", version: int = 1
) -> Packed:
    group = k if group == -1 else group
    group_of = groups_of(k, group, order)
    count = -(-k // group)
    codes, scale = integers(n, k, bits), scales(n, count, bits)
    middle = 1 << (bits - 1)
    # Version 1 stores zero - 1 in `bits` bits, so 0 is stored as the largest code. With 3 bits a reader restores the 0;
    # with other widths it adds to whole words, with carries.
    least = 1 if version == 1 and bits != 3 else 0
    zeros = [[middle if symmetric else random.randrange(least, 1 << bits) for _ in range(count)] for _ in range(n)]
    tensors = {
        "m.qweight": int32(columns([words(row, bits) for row in codes])),
        "m.qzeros": int32(
            [words([(zero - (version == 1)) % (1 << bits) for zero in column], bits) for column in columns(zeros)]
        ),
        "m.scales": scale.t().contiguous(),
        "m.g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    return tensors, values(codes, zeros, scale, group_of)


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(n: int, k: int, group: int = -1) -> Packed:
    group = k if group == -1 else group
    count = -(-k // group)
    codes, scale = integers(n, k, 4), scales(n, count, 4)
    zeros = integers(n, count, 4)

    def interleaved(column: list[int]) -> list[int]:
        """Packed codes of all outputs for one input."""
        return words([column[start + i] for start in range(0, n, 8) for i in AWQ_ORDER], 4)

    tensors = {
        "m.qweight": int32([interleaved(column) for column in columns(codes)]),
        "m.qzeros": int32([interleaved(column) for column in columns(zeros)]),
        "m.scales": scale.t().contiguous(),
    }
    return tensors, values(codes, zeros, scale, groups_of(k, group, "sequential"))


def bitsandbytes_4bit(
    n: int, k: int, kind: str = "nf4", block: int = 64, nested: bool = False, stored_as: torch.dtype = torch.uint8
) -> Packed:
    levels = torch.tensor(NF4) if kind == "nf4" else torch.tensor(FP4) / 12
    codes = [code for row in integers(n, k, 4) for code in row]
    codes += [0] * (len(codes) % 2)
    octets = torch.tensor([codes[i] << 4 | codes[i + 1] for i in range(0, len(codes), 2)], dtype=torch.uint8)
    blocks = -(-n * k // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [n, k]}
    tensors = {"m.weight": octets.view(stored_as)[:, None], "m.weight.quant_map": levels}
    if nested:
        nested_block = 256
        offset = 0.3123
        nested_levels = torch.sort(torch.rand(256) * 2 - 1).values
        outer = torch.rand(-(-blocks // nested_block)) * 0.1
        inner = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        factors = outer.tolist()
        absmax = [
            level * factors[i // nested_block] + offset for i, level in enumerate(nested_levels[inner.long()].tolist())
        ]
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {
            "m.weight.absmax": inner,
            "m.weight.nested_absmax": outer,
            "m.weight.nested_quant_map": nested_levels,
        }
    else:
        scale = torch.rand(blocks) * 0.2 + 0.2
        absmax = [float(value) for value in scale]
        tensors["m.weight.absmax"] = scale
    tensors[f"m.weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    levels = levels.tolist()
    weight = torch.tensor(
        [levels[code] * absmax[i // block] for i, code in enumerate(codes[: n * k])], dtype=torch.float64
    )
    return tensors, weight.view(n, k)


def bitsandbytes_8bit(n: int, k: int) -> Packed:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    largest = torch.rand(n) * 0.3 + 0.15
    tensors = {"m.weight": codes, "m.SCB": largest, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.double() * largest.double()[:, None] / 127


def pack_quantized(
    n: int,
    k: int,
    bits: int,
    strategy: str = "group",
    group: int = 32,
    symmetric: bool = True,
    order: str = "sequential",
    packed: bool = True,
    spaced: bool = False,
) -> Packed:
    """`packed`: also pack zero points. `spaced`: pack widths that do not divide 32 like early versions."""
    group = group if strategy == "group" else k
    count, middle = -(-k // group), 1 << (bits - 1)
    group_of = groups_of(k, group, order)
    codes = integers(n, k, bits)
    scale = scales(n, count, bits, torch.bfloat16)
    if strategy == "tensor":
        scale = scale[:1].expand(n, 1)
    zeros = [[middle] * count for _ in range(n)] if symmetric else integers(n, count, bits)
    pack = spaced_words if spaced else words
    tensors = {
        "m.weight_packed": int32([pack(row, bits) for row in codes]),
        "m.weight_shape": torch.tensor([n, k]),
        "m.weight_scale": torch.tensor([float(scale[0, 0])], dtype=scale.dtype)
        if strategy == "tensor"
        else scale.contiguous(),
    }
    if not symmetric and packed:
        tensors["m.weight_zero_point"] = int32(columns([pack(column, bits) for column in columns(zeros)]))
    elif not symmetric:
        tensors["m.weight_zero_point"] = torch.tensor(
            [[zero - middle for zero in row] for row in zeros], dtype=torch.int8
        )
    if order != "sequential":
        tensors["m.weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    return tensors, values(codes, zeros, scale, group_of)


def int_quantized(n: int, k: int, strategy: str = "channel", group: int = 32, symmetric: bool = True) -> Packed:
    tensors, weight = pack_quantized(n, k, 8, strategy, group, symmetric, packed=False)
    for name in ("m.weight_packed", "m.weight_shape"):
        stored = tensors.pop(name)
        if name == "m.weight_packed":
            codes = [[(word >> (8 * i)) % 256 - 128 for word in row for i in range(4)] for row in stored.tolist()]
    return {"m.weight": torch.tensor(codes, dtype=torch.int8)} | tensors, weight


def float8(
    n: int,
    k: int,
    block: tuple[int, int],
    scale_shape: tuple[int, ...] | None = None,
    name: str = "weight_scale_inv",
    exponents: bool = False,
) -> Packed:
    """`scale_shape`: shape of the stored scales, if it differs from the grid of blocks."""
    codes = (torch.randn(n, k) * 20).to(torch.float8_e4m3fn)
    grid = (-(-n // block[0]), -(-k // block[1]))
    stored = torch.randint(118, 123, grid, dtype=torch.uint8) if exponents else torch.rand(grid) * 0.008 + 0.004
    scale = [[2.0 ** (value - 127) if exponents else value for value in row] for row in stored.tolist()]
    rows = [
        [value * scale[i // block[0]][j // block[1]] for j, value in enumerate(row)]
        for i, row in enumerate(codes.float().tolist())
    ]
    weight = torch.tensor(rows, dtype=torch.float64)
    return {"m.weight": codes, f"m.{name}": stored.reshape(scale_shape or grid)}, weight


def mxfp4(
    n: int, k: int, names: tuple[str, str] = ("m.weight_blocks", "m.weight_scales"), blocked: bool = True
) -> Packed:
    codes = integers(n, k, 4)
    octets = [[row[i] | row[i + 1] << 4 for i in range(0, k, 2)] for row in codes]
    powers = torch.randint(120, 126, (n, k // 32), dtype=torch.uint8)
    stored = torch.tensor(octets, dtype=torch.uint8)
    scale = [[2.0 ** (power - 127) for power in row] for row in powers.tolist()]
    weight = [[E2M1[code] * scale[i][j // 32] for j, code in enumerate(row)] for i, row in enumerate(codes)]
    return {names[0]: stored.view(n, k // 32, 16) if blocked else stored, names[1]: powers}, torch.tensor(
        weight, dtype=torch.float64
    )


def mxfp6(n: int, k: int) -> Packed:
    codes = integers(n, k, 6)
    triples = [
        [word >> shift & 255 for i in range(0, k, 4) for word in [fields(row[i : i + 4], 6)] for shift in (0, 8, 16)]
        for row in codes
    ]
    powers = torch.randint(120, 126, (n, k // 32), dtype=torch.uint8)
    scale = [[2.0 ** (power - 127) for power in row] for row in powers.tolist()]
    weight = [[e2m3(code) * scale[i][j // 32] for j, code in enumerate(row)] for i, row in enumerate(codes)]
    stored = {"m.weight_packed": torch.tensor(triples, dtype=torch.uint8), "m.weight_scale": powers}
    return stored, torch.tensor(weight, dtype=torch.float64)


def fields(values: list[int], bits: int) -> int:
    return sum(value << (i * bits) for i, value in enumerate(values))


def e2m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 3, code & 7
    size = (8 + mantissa) / 8 * 2 ** (exponent - 1) if exponent else mantissa / 8
    return -size if code & 32 else size


def nvfp4(n: int, k: int, names: tuple[str, str], divides: bool) -> Packed:
    """`names`: of the codes, and of the matrix's number, which divides the scales or multiplies them."""
    codes = integers(n, k, 4)
    octets = [[row[i] | row[i + 1] << 4 for i in range(0, k, 2)] for row in codes]
    scales = (torch.rand(n, k // 16) * 400 + 20).to(torch.float8_e4m3fn)
    number = torch.tensor([3001.7 if divides else 1 / 3001.7])
    factor = 1 / number.double().item() if divides else number.double().item()
    weight = [
        [E2M1[code] * scales[i, j // 16].item() * factor for j, code in enumerate(row)] for i, row in enumerate(codes)
    ]
    stored = {names[0]: torch.tensor(octets, dtype=torch.uint8), "m.weight_scale": scales, names[1]: number}
    return stored, torch.tensor(weight, dtype=torch.float64)


def relative_error(found: Tensor, weight: Tensor) -> float:
    """The largest difference, divided by the largest weight."""
    return (
        ((found.double() - weight).abs().max() / weight.abs().max()).item() if not math.isnan(found.sum()) else math.inf
    )
