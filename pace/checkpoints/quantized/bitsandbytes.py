"""bitsandbytes: nf4 and fp4 with a scale for each block of weights, and int8 with a scale for each row.

4 bits, of the matrix flattened row by row:

    weight                          uint8 [N K / 2, 1]    two codes a byte, the first in the high bits;
                                                          or the same bytes as another dtype

    weight.absmax                   float [blocks]        scales; uint8 with double quantisation, see below

    weight.quant_map                float [16]            levels

    weight.quant_state.bitsandbytes__nf4 (or fp4)         JSON as uint8: blocksize, shape, nested_blocksize, ...

    W[n, k] = quant_map[code] * absmax[(n K + k) // blocksize]

Double quantisation:

    weight.nested_absmax            float [blocks / 256]
    weight.nested_quant_map         float [256]

    absmax[b] = nested_quant_map[code] * nested_absmax[b // 256] + nested_offset

8 bits:

    weight int8 [N, K],  SCB float [N],  weight_format (0: by rows)

    W[n, k] = weight[n, k] * SCB[n] / 127

Source: the code of bitsandbytes, https://github.com/bitsandbytes-foundation/bitsandbytes"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.checkpoints.quantized.method import Method, modules_stored_as, modules_with, read_flag, wrong
from pace.checkpoints.quantized.stored import FLOATS, StoredMatrix, StoredTensors, as_bytes
from pace.ops.weight_layout import CODEBOOKS, MIN_GROUP, QuantizedRows, WeightLayout

KINDS = ("nf4", "fp4")
STATE = ".weight.quant_state.bitsandbytes__"
MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True)
class BitsAndBytes(Method):
    """A module's tensors determine its kind; modules without scales are not quantised."""

    name: ClassVar[str] = "bitsandbytes"

    bits: int

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> BitsAndBytes:
        four, eight = read_flag(raw, "load_in_4bit", False), read_flag(raw, "load_in_8bit", False)
        if four == eight:
            raise wrong("load_in_4bit", "the opposite of load_in_8bit", four)
        return cls(bits=4 if four else 8)

    def matrices(self, source: StoredTensors) -> Iterator[StoredMatrix]:
        if self.bits == 8:
            # A module with an int8 weight but no scales is refused.
            for module in dict.fromkeys([*modules_with(source, ".SCB"), *modules_stored_as(source, torch.int8)]):
                yield RowScaledMatrix(source, module)
            return
        kinds = {module: kind for kind in KINDS for module in modules_with(source, STATE + kind)}
        for module in dict.fromkeys([*kinds, *modules_with(source, ".weight.absmax")]):
            yield BlockScaledMatrix(source, module, kinds.get(module, KINDS[0]))


class RowScaledMatrix(StoredMatrix):
    by_rows = ("codes", "scales")
    dtype = WeightLayout("int8", None)

    def __init__(self, source: StoredTensors, module: str):
        super().__init__(source, module, {"codes": ".weight", "scales": ".SCB"}, optional={"layout": ".weight_format"})
        self.shape = self.expect("codes", (torch.int8,), (-1, -1))
        self.expect("scales", FLOATS, (self.shape[0],))
        if self.has("layout"):
            self.expect("layout", (torch.uint8, torch.int8, torch.int32, torch.int64), (), (1,))
            if layout := self.stored("layout").reshape(-1)[0].item():
                raise NotImplementedError(
                    f"tensor {self.parts['layout']!r} is {layout}, a layout for certain GPUs; 0 (by rows) is "
                    "implemented: save the model again"
                )

    def read(self, start: int, stop: int) -> QuantizedRows:
        scales = self.finite("scales", self.stored("scales", start, stop)) / 127
        return QuantizedRows(self.dtype, self.stored("codes", start, stop), scales[:, None])


class BlockScaledMatrix(StoredMatrix):
    def __init__(self, source: StoredTensors, module: str, kind: str):
        parts = {"codes": ".weight", "scales": ".weight.absmax", "levels": ".weight.quant_map", "state": STATE + kind}
        nested = {"nested_scales": ".weight.nested_absmax", "nested_levels": ".weight.nested_quant_map"}
        super().__init__(source, module, parts, optional=nested)
        self.state = self._read_state()
        self.shape = self._sizes("shape", 2)
        [self.block] = self._sizes("blocksize", 1)
        n, k = self.shape
        blocks = -(-n * k // self.block)
        dtype, shape = self.info("codes")
        if math.prod(shape) * dtype.itemsize != -(-n * k // 2):
            raise ValueError(
                f"tensor {self.parts['codes']!r} has {math.prod(shape) * dtype.itemsize} bytes; 4-bit codes of a "
                f"matrix {[n, k]} need {-(-n * k // 2)}"
            )
        if self.has("nested_scales") or self.info("scales")[0] == torch.uint8:
            self._expect_nested(blocks)
        else:
            self.expect("scales", FLOATS, (blocks,))
        self.expect("levels", FLOATS, (16,))
        self.levels = self.finite("levels", self.stored("levels"))
        # Blocks of 64 across rows of 96 become groups of 32 with repeated scales.
        self.group = math.gcd(self.block, k)
        known = torch.allclose(self.levels, torch.tensor(CODEBOOKS[kind]), rtol=0, atol=1e-6)
        self.dtype = (
            WeightLayout("int4", self.group, codebook=kind) if known and self.group % MIN_GROUP == 0 else torch.float32
        )

    def _read_state(self) -> dict[str, Any]:
        name = self.parts["state"]
        [size] = self.expect("state", (torch.uint8,), (-1,))
        try:
            state = json.loads(bytes(self.stored("state").tolist()).decode()) if size <= MAX_STATE_BYTES else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tensor {name!r} must hold a JSON object; it does not: {error}") from None
        if not isinstance(state, dict):
            raise ValueError(
                f"tensor {name!r} must hold a JSON object of at most {MAX_STATE_BYTES} bytes; got {size} bytes"
            )
        return state

    def _sizes(self, field: str, count: int) -> tuple[int, ...]:
        value = self.state.get(field)
        sizes = tuple(value) if isinstance(value, list) else (value,)
        if len(sizes) != count or not all(type(size) is int and 1 <= size < 1 << 31 for size in sizes):
            raise ValueError(
                f"{field} in tensor {self.parts['state']!r} must be {count} positive integers; got {str(value)[:80]}"
            )
        return sizes

    def _expect_nested(self, blocks: int) -> None:
        parts = {"nested_scales": "nested_absmax", "nested_levels": "nested_quant_map"}
        if missing := [part for role, part in parts.items() if not self.has(role)]:
            raise ValueError(
                f"tensor {self.parts['scales']!r} is quantised, but {self.module}.weight lacks {', '.join(missing)}"
            )
        [self.nested_block] = self._sizes("nested_blocksize", 1)
        offset = self.state.get("nested_offset")
        if type(offset) not in (int, float) or not math.isfinite(offset):
            raise ValueError(
                f"nested_offset in tensor {self.parts['state']!r} must be a number; got {str(offset)[:80]}"
            )
        self.nested_offset = float(offset)
        self.expect("scales", (torch.uint8,), (blocks,))
        self.expect("nested_scales", FLOATS, (-(-blocks // self.nested_block),))
        self.expect("nested_levels", FLOATS, (256,))

    def read(self, start: int, stop: int) -> QuantizedRows | Tensor:
        rows, k = stop - start, self.shape[1]
        first, last = start * k, stop * k
        packed = self._code_bytes(first // 2, -(-last // 2))
        scales = self._block_scales(first // self.block, -(-last // self.block))
        # The first code is in the high bits.
        if not isinstance(self.dtype, WeightLayout):
            codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[first % 2 :][: last - first].view(rows, k)
            block_of = torch.arange(first, last) // self.block - first // self.block
            return self.levels[codes.long()] * scales[block_of].view(rows, k)
        block_of = torch.arange(first, last, self.group) // self.block - first // self.block
        pairs = (packed >> 4 | packed << 4).view(rows, k // 2)  # groups are multiples of 16, and so is k
        return QuantizedRows(self.dtype, pairs, scales[block_of].view(rows, k // self.group), paired_k=k)

    def _code_bytes(self, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) of the codes, regardless of their stored dtype and shape."""
        dtype, shape = self.info("codes")
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        first = start // row_bytes
        stored = as_bytes(self.stored("codes", first, -(-stop // row_bytes)).flatten())
        return stored[start - first * row_bytes : stop - first * row_bytes]

    def _block_scales(self, start: int, stop: int) -> Tensor:
        scales = self.stored("scales", start, stop)
        if not self.has("nested_scales"):
            return self.finite("scales", scales)
        outer = torch.arange(start, stop) // self.nested_block
        levels = self.finite("nested_levels", self.stored("nested_levels"))
        return self.finite(
            "nested_scales", levels[scales.long()] * self.stored("nested_scales").float()[outer] + self.nested_offset
        )
