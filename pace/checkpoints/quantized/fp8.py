"""float8 weights (E4M3) with a scale for each block, as in DeepSeek-V3, or for a group of a row, a row, or the matrix.

    weight           float8_e4m3fn [N, K]

    weight_scale_inv float [ceil(N / B0), ceil(K / B1)], weight_block_size = [B0, B1]; ModelOpt adds dimensions of 1
                     without weight_block_size a scalar; or named `weight_scale`

    W[n, k] = weight[n, k] * scale[n // B0, k // B1]

Scales stored as bytes are exponents (E8M0): 2^(byte - 127).

The matrices of all experts may be one tensor, as in transformers 5: {name} [E, N, K] and {name}_scale_inv, whose first
dimension is also E."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.checkpoints.quantized.method import MAX_GROUP, Method, modules_stored_as, read_name, refused, wrong
from pace.checkpoints.quantized.stored import FLOATS, StoredMatrix, StoredTensors
from pace.ops.weight_layout import MIN_GROUP, QuantizedRows, WeightLayout
from pace.quant.format import power_of_two

EXPONENTS = tuple(dtype for dtype in (torch.uint8, getattr(torch, "float8_e8m0fnu", None)) if dtype)
SCALES = (".weight_scale_inv", ".weight_scale")
Block = tuple[int, int]


@dataclass(frozen=True)
class FP8(Method):
    name: ClassVar[str] = "fp8"
    unused: ClassVar[tuple[str, ...]] = (".input_scale", ".activation_scale", ".input_scale_inv", ".output_scale")

    block: Block | None
    """Rows and columns that share a scale; None for a whole matrix."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> FP8:
        if read_name(raw, "fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise refused("fmt", raw["fmt"], "e4m3 is; take the original checkpoint")
        return cls(block=read_block(raw, "weight_block_size"))

    def matrices(self, source: StoredTensors) -> Iterator[Float8Matrix]:
        for module in modules_stored_as(source, torch.float8_e4m3fn):
            scale = next((suffix for suffix in SCALES if module + suffix in source.tensors), SCALES[0])
            yield Float8Matrix(source, module, scale, [self.block] if self.block else [])
        for name, (dtype, _) in source.tensors.items():
            is_stack = dtype == torch.float8_e4m3fn and not name.endswith(".weight")
            if is_stack and f"{name}_scale_inv" in source.tensors:
                yield Float8Matrix(source, name, "_scale_inv", [self.block] if self.block else [], codes="")


def read_block(raw: dict[str, Any], field: str) -> Block | None:
    block = raw.get(field)
    if block is None:
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and 1 <= size <= MAX_GROUP for size in block)
    ):
        raise wrong(field, f"two integers in 1..{MAX_GROUP}, rows and columns, or null", block)
    return block[0], block[1]


class Float8Matrix(StoredMatrix):
    by_rows = ("codes",)

    def __init__(self, source: StoredTensors, module: str, scale: str, blocks: list[Block], codes: str = ".weight"):
        """`blocks`: possible rows and columns that share a scale, in addition to a row and the whole matrix. The
        scales' shape determines which."""
        super().__init__(source, module, {"codes": codes, "scales": scale})
        *stack, n, k = self.shape = self.expect("codes", (torch.float8_e4m3fn,), (-1, -1), (-1, -1, -1))
        blocks = [(1, max(1, k)), (max(1, n), max(1, k)), *blocks]
        grids = [(-(-n // rows), -(-k // columns)) for rows, columns in blocks]
        vectors = () if stack else ((), (1,), (n,))
        spaced = () if stack else [(rows, 1, columns, 1) for rows, columns in grids]
        found = self.expect("scales", FLOATS + EXPONENTS, *vectors, *((*stack, *grid) for grid in grids), *spaced)
        found = found[::2] if len(found) == 4 else found
        grid = found[-2:] if len(found) >= 2 else (found[0] if found else 1, 1)
        self.grid = grid
        self.block = blocks[grids.index(grid)]
        columns = self.block[1]
        if grid[1] == 1:
            self.dtype = WeightLayout("float8", None)
        else:
            self.dtype = torch.float32 if columns % MIN_GROUP else WeightLayout("float8", columns)

    @property
    def name(self) -> str:
        return self.parts["codes"]

    def read(self, start: int, stop: int) -> QuantizedRows | Tensor:
        scales = self.stored("scales")
        scales = self.finite("scales", power_of_two(scales) if scales.dtype in EXPONENTS else scales)
        rows, n = torch.arange(start, stop), max(1, self.shape[-2])
        scales = scales.reshape(-1, self.grid[1])[rows // n * self.grid[0] + rows % n // self.block[0]]
        codes = self.rows("codes", start, stop)
        if isinstance(self.dtype, WeightLayout):
            return QuantizedRows(self.dtype, codes.view(torch.uint8), scales)
        return codes.float() * scales.repeat_interleave(self.block[1], dim=1)[:, : self.shape[-1]]
