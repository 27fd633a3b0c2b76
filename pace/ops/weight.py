"""`PackedWeight`: a matrix in the panel layout of the native kernels, in memory that is zero until it is packed."""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from pace import _C
from pace.memory import reserve
from pace.ops.blocks import BlockRows
from pace.ops.checks import check_float_rows, check_order, check_quantized_rows
from pace.ops.weight_layout import GRIDS, AnyLayout, MixedLayout, QuantizedRows, WeightLayout, parts_of

# Numbers of DType in csrc/include/pace/types.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Numbers of Code in csrc/include/pace/types.h.
LAYOUT_CODES = {"int8": 1, "int4": 2, "float8": 3, "int2": 4, "int3": 5, "int5": 6, "int6": 7}
LAYOUT_CODES |= {code: number for number, code in enumerate(GRIDS, 8)} | {"int1": 15}

# Numbers of GroupScales in csrc/include/pace/types.h, by the bits of scales in super-blocks.
GROUP_SCALES = {None: 0, 8: 1, 6: 2, 4: 3}

LEVEL_FACTORS = {"nf4": 123.25, "fp4": 120.0, "mxfp4": 2.0, "iq4_nl": 1.0}
"""Codebooks are multiplied as int8: round(level * factor); scales are divided by the factor. Exact for mxfp4 and
iq4_nl. nf4 is off by at most 0.0029 and fp4 by 0.0032 of a group's largest weight, with the best factors up to 127."""

CACHE_LINE = 64


class Slabs:
    """Memory for weights, cut from large pieces so that small weights lie on huge pages, too. With 4 KB pages, reading
    a weight of 2 MB spent a quarter of its time in page-table walks (virtual machine, Zen 4)."""

    SLAB_BYTES = 256 << 20

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int, alignment: int = CACHE_LINE) -> Tensor:
        """Returns uint8 zeros, aligned to a cache line or to `alignment`. A slab is freed when nothing refers to it any
        more. Memory is never reused."""
        with self._lock:
            start = -(-self._used // alignment) * alignment
            if start + num_bytes > len(self._slab):
                self._slab, start = torch.frombuffer(self._reserve(num_bytes), dtype=torch.uint8), 0
            self._used = start + -(-num_bytes // CACHE_LINE) * CACHE_LINE
            return self._slab[start : start + num_bytes]

    def _reserve(self, num_bytes: int) -> mmap.mmap:
        try:
            return reserve(max(self.SLAB_BYTES, num_bytes), huge_pages=True)
        except OSError:  # a limit on addresses, which may leave room for num_bytes
            return reserve(num_bytes, huge_pages=True)


_slabs = Slabs()
take_memory = _slabs.take


class Room(NamedTuple):
    """Memory for a weight, aligned to a cache line."""

    address: int
    owner: object
    """Object that keeps the memory alive."""
    is_packed: bool = False
    """True if the memory already holds the weight, read-only; else it holds zeros."""

    @classmethod
    def take(cls, num_bytes: int, alignment: int = CACHE_LINE) -> Room:
        memory = take_memory(num_bytes, alignment)
        return cls(memory.data_ptr(), memory)

    def at(self, offset: int) -> Room:
        """Returns the memory from byte `offset` on."""
        return self._replace(address=self.address + offset)


class PackedWeight:
    """A matrix `[n, k]` packed for the kernels. It is float32, bfloat16 or float16 for the current instruction set,
    quantised (`WeightLayout`), or in parts of several layouts (`MixedLayout`).

    `dtype` is the dtype of `unpack`: the layout itself, or float32 for a quantised or mixed weight.

    With `glu`, its rows are `[gate; up]`, n / 2 each, stored so that one tile of the kernel holds both. `nbytes`
    includes header and padding. The memory is private and untouched at first: pages become resident when rows are
    packed into them, and are released with the weight. With several NUMA nodes they become resident at once, each on
    the node of the thread that will read it.

    Raises ValueError for impossible sizes, TypeError for other dtypes. Layout: csrc/kernels/pack.inl."""

    __slots__ = (
        "n", "k", "layout", "dtype", "glu", "order", "nbytes", "address", "n_out", "_order32", "order_address",
        "_buffer", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        n: int,
        k: int,
        layout: AnyLayout,
        glu: bool = False,
        order: Tensor | None = None,
        room: Room | None = None,
    ):
        """`room`: memory of at least `nbytes`; allocated if None. Raises ValueError if `room` should already hold such
        a weight and does not."""
        if n < 1 or k < 1:
            raise ValueError(f"a weight needs at least one row and one column; got [{n}, {k}]")
        if glu and n % 2:
            raise ValueError(f"a gate/up weight has as many gate rows as up rows; got {n} rows in all")
        for _, of_part in parts_of(layout, n):
            if not isinstance(of_part, WeightLayout) and of_part not in DTYPE_CODES:
                raise TypeError(f"weights are stored as float32, bfloat16, float16 or a WeightLayout; got {of_part}")
            if order is not None:
                check_order(order, k, of_part)
        self.n, self.k, self.layout, self.glu, self.order = n, k, layout, glu, order
        self.dtype = layout if isinstance(layout, torch.dtype) else torch.float32
        self._order32 = None if order is None else order.int()
        self.order_address = 0 if order is None else self._order32.data_ptr()
        self.n_out = n // 2 if glu else n
        self.nbytes = weight_nbytes(n, k, layout, glu)
        self.address, self._buffer, is_packed = room or Room.take(self.nbytes)
        weakref.finalize(self, _C.release_pages, self.address, self.nbytes).atexit = False
        if is_packed:
            _check(self.address, n, k, layout, glu)
            return
        _init(self.address, n, k, layout, glu)
        if _C.cpu_info()["numa_nodes"] > 1:
            _C.place_packed(self.address)

    def __repr__(self) -> str:
        return f"PackedWeight(n={self.n}, k={self.k}, layout={self.layout}, glu={self.glu}, nbytes={self.nbytes})"


def weight_nbytes(n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
    """Bytes of a weight, header and padding included."""
    return _C.packed_bytes([(rows, _format(of_part)) for rows, of_part in parts_of(layout, n)], k, glu)


def _init(address: int, n: int, k: int, layout: AnyLayout, glu: bool) -> None:
    levels = [_levels(of_part) for _, of_part in parts_of(layout, n)]  # kept alive until they are copied
    _C.init_packed(address, _parts(n, layout, levels), k, glu)


def _check(address: int, n: int, k: int, layout: AnyLayout, glu: bool) -> None:
    """Raises ValueError unless the memory has the headers of such a weight, which the kernels rely on."""
    levels = [_levels(of_part) for _, of_part in parts_of(layout, n)]
    if not _C.is_packed(address, _parts(n, layout, levels), k, glu):
        raise ValueError(f"no weight [{n}, {k}] in {layout} lies there")


def _parts(n: int, layout: AnyLayout, levels: list[Tensor | None]) -> list[tuple[int, _C.PackedFormat]]:
    return [
        (rows, _format(of_part, 0 if table is None else table.data_ptr()))
        for (rows, of_part), table in zip(parts_of(layout, n), levels)
    ]


def _format(layout: torch.dtype | WeightLayout, levels: int = 0) -> _C.PackedFormat:
    if isinstance(layout, WeightLayout):
        return _C.PackedFormat(
            DTYPE_CODES[torch.float32],
            LAYOUT_CODES[layout.code],
            layout.group or 0,
            layout.has_mins,
            levels,
            -1 if layout.offset is None else layout.offset,
            0 if layout.code in GRIDS else GROUP_SCALES[layout.scale_bits],
            layout.token_inputs,
        )
    return _C.PackedFormat(DTYPE_CODES[layout])


def _levels(layout: torch.dtype | WeightLayout) -> Tensor | None:
    """Returns int8 `[16]`: the multipliers of a codebook's codes; None without a codebook."""
    if not isinstance(layout, WeightLayout) or layout.codebook is None:
        return None
    return (layout.levels * LEVEL_FACTORS[layout.codebook]).round().to(torch.int8)


def empty_weight(n: int, k: int, layout: AnyLayout, glu: bool = False, order: Tensor | None = None) -> PackedWeight:
    return PackedWeight(n, k, layout, glu, order)


def pack_rows_(weight: PackedWeight, source: Tensor, row: int) -> None:
    """Rounds float64 to float32 first. Raises TypeError for another dtype."""
    dtype = check_float_rows(weight, source, row)
    if source.dtype not in DTYPE_CODES:
        if source.dtype != torch.float64:
            raise TypeError(f"weights are packed from floating point tensors; got {source.dtype}")
        source = source.to(dtype)
    if source.device.type != "cpu":
        raise ValueError(f"weights are packed from CPU tensors; got one on {source.device}")
    if source.stride(1) != 1 and source.shape[1] > 1:
        source = source.contiguous()
    _C.pack_rows(weight.address, row, source.shape[0], source.data_ptr(), DTYPE_CODES[source.dtype], source.stride(0))


def pack_quantized_(weight: PackedWeight, rows: QuantizedRows | BlockRows, row: int) -> None:
    check_quantized_rows(weight, rows, row)
    if isinstance(rows, BlockRows):
        return rows.pack(weight.address, row)
    if rows.layout.code in GRIDS:
        raise ValueError(f"{rows.layout.code} weights are packed from the blocks of a file; got unpacked rows")
    if rows.layout.in_super_blocks:
        return _pack_super_blocks(weight, rows.unpaired(), row)
    if rows.paired_k is not None and rows.paired_k % 2:
        rows = rows.unpaired()
    codes, scales, mins = rows.codes, rows.scales.contiguous(), rows.mins
    if codes.stride(1) != 1 and codes.shape[1] > 1:
        codes = codes.contiguous()
    if rows.layout.codebook:
        scales = scales / LEVEL_FACTORS[rows.layout.codebook]
    if mins is not None:
        mins = mins.contiguous()
    mins_address = 0 if mins is None else mins.data_ptr()
    _C.pack_codes(
        weight.address,
        row,
        rows.shape[0],
        codes.data_ptr(),
        codes.stride(0),
        scales.data_ptr(),
        mins_address,
        rows.paired_k is not None,
    )


def _pack_super_blocks(weight: PackedWeight, rows: QuantizedRows, row: int) -> None:
    codes = rows.codes if rows.codes.stride(1) == 1 else rows.codes.contiguous()
    numbers = [
        None if part is None else part.contiguous()
        for part in (rows.scales, rows.mins, rows.super_scales, rows.super_mins)
    ]
    addresses = [0 if part is None else part.data_ptr() for part in numbers]
    _C.pack_super_blocks(weight.address, row, rows.shape[0], codes.data_ptr(), codes.stride(0), *addresses)


def unpack(weight: PackedWeight) -> Tensor:
    """Returns the matrix `[n, k]` of a packed weight. Float weights come back bit for bit. Quantised ones differ from
    `QuantizedRows.dequantize` by the rounding of groups' scales and minima (by 2^-11) and by the error in
    `LEVEL_FACTORS`. In super-blocks they are equal."""
    out = torch.empty(weight.n, weight.k, dtype=weight.dtype)
    mixed = isinstance(weight.layout, MixedLayout)
    _C.gather_rows(weight, None, weight.n, out, mixed)
    return out
