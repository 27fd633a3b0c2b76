"""compressed-tensors, the format of llm-compressor: integers or floats with scales for the matrix, rows, groups or
blocks.

    pack-quantized    weight_packed int32 [N, ceil(K bits / 32)], along K, the lowest bits first
                      weight_shape int64 [2] = N, K

    int-quantized     weight int8 [N, K]
    float-quantized   weight float8_e4m3fn [N, K]
    naive-quantized   either of the two above

    mxfp4-pack-quantized     E2M1 in groups of 32 with E8M0 scales, see mxfp4.py

    mxfp6-pack-quantized     E2M3, see mxfp6.py
    mxfp8-quantized          E4M3, as float-quantized

    nvfp4-pack-quantized     E2M1 in groups of 16 with E4M3 scales, see nvfp4.py

    weight_scale        [1], [N, 1], [N, G] or [ceil(N / B0), ceil(K / B1)]

    weight_zero_point   int8 as weight_scale, or packed along N
    weight_g_idx        int32 [K]: the group of each input (actorder "group")

    W[n, k] = (q[n, k] - zero_point[n, g]) * weight_scale[n, g]
    packed: u = q + 2^(bits - 1), and the same for zero points

Versions before 0.16 packed fields of 3, 5, 6 and 7 bits without crossing words, 32 // bits in each. The number of words
shows which packing was used. Settings for activations are not used: the kernels choose their own treatment.

Source: the code of compressed-tensors, https://github.com/vllm-project/compressed-tensors"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.checkpoints.quantized.fp8 import Block, Float8Matrix, read_block
from pace.checkpoints.quantized.method import (
    Method,
    modules_stored_as,
    modules_with,
    read_bits,
    read_group_size,
    read_name,
    refused,
    wrong,
)
from pace.checkpoints.quantized.mxfp4 import MXFP4Matrix
from pace.checkpoints.quantized.mxfp6 import BLOCK_BYTES, MXFP6Matrix
from pace.checkpoints.quantized.nvfp4 import NVFP4Matrix
from pace.checkpoints.quantized.stored import (
    FLOATS,
    Groups,
    IntegerMatrix,
    StoredMatrix,
    StoredTensors,
    as_bytes,
    unpack,
)

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)
FLOAT_BITS = {"mxfp4-pack-quantized": 4, "nvfp4-pack-quantized": 4, "mxfp6-pack-quantized": 6}
"""Widths of floats; 8 for other formats."""
ADVICE = f"implemented: {', '.join(FORMATS)}; take a checkpoint in one of these, or the original"


@dataclass(frozen=True)
class CompressedTensors(Method):
    """Settings in `config_groups`. The shapes of a module's tensors determine which apply to it, so no name patterns
    are matched."""

    name: ClassVar[str] = "compressed-tensors"
    unused: ClassVar[tuple[str, ...]] = tuple(
        f".{of}_{what}" for of in ("input", "output") for what in ("scale", "zero_point", "global_scale")
    )

    bits: tuple[int, ...]
    """Widths of integers in any of the groups."""
    group_sizes: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> CompressedTensors:
        if raw.get("transform_config"):
            raise refused("transform_config", raw["transform_config"], "take the original checkpoint")
        sparsity = raw.get("sparsity_config") or {}
        if not isinstance(sparsity, dict):
            raise wrong("sparsity_config", "an object or null", sparsity)
        if read_name(sparsity, "format", "dense") != "dense":
            raise refused(
                "sparsity_config.format", sparsity["format"], "take a checkpoint without sparsity, or the original"
            )
        groups = raw.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise wrong("config_groups", "an object with a group or more", groups)
        found = [cls._read_group(name, group, read_name(raw, "format", "dense")) for name, group in groups.items()]
        weights = [weights for weights in found if weights]
        if not weights:
            raise refused(
                "config_groups",
                groups,
                "it needs a group with weights, not only activations; take the original checkpoint",
            )
        integers = {weights["num_bits"] for weights in weights if weights["type"] == "int"}
        sizes = [read_group_size(weights) for weights in weights]
        blocks = [read_block(weights, "block_structure") for weights in weights]
        return cls(
            tuple(sorted(integers)),
            tuple(sorted({size for size in sizes if size})),
            tuple(sorted({block for block in blocks if block})),
        )

    @classmethod
    def _read_group(cls, name: str, group: Any, default_format: str) -> dict[str, Any] | None:
        """Checks the used arguments of a group's weights and returns them. None if the weights stay floats."""
        if not isinstance(group, dict) or not isinstance(group.get("weights") or {}, dict):
            raise wrong(f"config_groups.{name[:80]}", "an object whose weights are an object or null", group)
        if not group.get("weights"):
            return None
        weights = dict(group["weights"])
        layout = read_name(group, "format", default_format)
        if layout not in FORMATS:
            raise refused("format", layout, ADVICE)
        weights["type"] = read_name(weights, "type", "int")
        weights["num_bits"] = weights.get("num_bits", 8)
        if weights["type"] == "int":
            read_bits(weights, tuple(range(2, 9)), "num_bits")
        elif weights["type"] != "float" or weights["num_bits"] != FLOAT_BITS.get(layout, 8):
            raise refused(
                f"config_groups.{name[:80]}.weights", {key: weights[key] for key in ("type", "num_bits")}, ADVICE
            )
        if isinstance(structure := weights.get("block_structure"), str):  # "128x128", as early versions wrote it
            weights["block_structure"] = [
                int(size) if size.isdecimal() and len(size) < 9 else None for size in structure.split("x")
            ]
        return weights

    def matrices(self, source: StoredTensors) -> Iterator[StoredMatrix]:
        for module in modules_with(source, ".weight_packed"):
            yield self._packed(source, module)
        for module in modules_stored_as(source, torch.int8):
            yield Int8Matrix(source, module, self)
        for module in modules_stored_as(source, torch.float8_e4m3fn):
            yield Float8Matrix(
                source, module, ".weight_scale", [*((1, size) for size in self.group_sizes), *self.blocks]
            )

    def _packed(self, source: StoredTensors, module: str) -> StoredMatrix:
        """A matrix of small integers or floats. Dtypes and shapes of its codes and scales show which."""
        dtype, packed = source.tensors[f"{module}.weight_packed"]
        scale_dtype, scales = source.tensors.get(f"{module}.weight_scale", (None, ()))
        if scale_dtype == torch.float8_e4m3fn:
            return NVFP4Matrix(source, module, ".weight_packed", ".weight_global_scale", divides=True)
        if dtype != torch.uint8:
            return PackedMatrix(source, module, self)
        if packed[-1:] and scales[-1:] and packed[-1] == BLOCK_BYTES * scales[-1]:
            return MXFP6Matrix(source, module)
        return MXFP4Matrix(source, module, ".weight_packed", ".weight_scale")


class ScaledMatrix(IntegerMatrix):
    """Scales, zero points and column order, common to both integer layouts."""

    def __init__(self, source: StoredTensors, module: str, codes: str, more: dict[str, str]):
        parts = {"codes": codes, "scales": ".weight_scale", **more}
        super().__init__(source, module, parts, optional={"zeros": ".weight_zero_point", "groups": ".weight_g_idx"})

    def expect_scales(self, method: CompressedTensors) -> None:
        n, k = self.shape
        found = self.expect("scales", FLOATS, (), (1,), (1, 1), (n, -1))
        count = found[1] if len(found) == 2 else 1
        self.whole_matrix = found != (n, count)
        sizes = [k] if count == 1 else [size for size in method.group_sizes if -(-k // size) == count]
        if not sizes:
            raise ValueError(
                f"tensor {self.parts['scales']!r} has {count} groups of {k} inputs; the group sizes in "
                f"quantization_config are {', '.join(map(str, method.group_sizes)) or 'none'}"
            )
        self.groups = Groups(k, count, sizes[0], self._group_index(count))
        self.choose_layout(symmetric=not self.has("zeros"))

    def _group_index(self, count: int) -> Tensor | None:
        if not self.has("groups"):
            return None
        index = self.group_index(count, minimum=-1)
        return None if (index == -1).any() else index  # the initial value, which is kept if groups are contiguous

    def scales(self, start: int, stop: int) -> Tensor:
        if self.whole_matrix:
            return self.finite("scales", self.stored("scales").reshape(1, 1)).expand(stop - start, 1).contiguous()
        return self.finite("scales", self.stored("scales", start, stop))

    def stored_zeros(self, start: int, stop: int) -> Tensor:
        """int16 `[rows, G]` of zero points that are not packed."""
        if self.whole_matrix:
            zeros = self.stored("zeros").reshape(1, 1).expand(stop - start, 1)
        else:
            zeros = self.stored("zeros", start, stop)
        return zeros.to(torch.int16) + (1 << (self.bits - 1))

    def expect_zeros(self, *packed: tuple[int, int]) -> None:
        """Expects integers in the scales' shape, or int32 in one of the shapes `packed`."""
        if self.has("zeros"):
            is_packed = packed and self.info("zeros")[0] == torch.int32
            self.expect("zeros", INTEGERS, *(packed if is_packed else (self.info("scales")[1],)))

    def zeros_in_range(self, zeros: Tensor) -> Tensor:
        if zeros.numel() and (zeros.min() < 0 or zeros.max() >= 1 << self.bits):
            middle = 1 << (self.bits - 1)
            raise ValueError(
                f"tensor {self.parts['zeros']!r} holds zero points of {zeros.min().item() - middle}.."
                f"{zeros.max().item() - middle}; with {self.bits} bits they are {-middle}..{middle - 1}"
            )
        return zeros


class Int8Matrix(ScaledMatrix):
    by_rows = ("codes",)
    bits = 8

    def __init__(self, source: StoredTensors, module: str, method: CompressedTensors):
        super().__init__(source, module, ".weight", {})
        self.shape = self.expect("codes", (torch.int8,), (-1, -1))
        self.expect_scales(method)
        self.expect_zeros()

    def codes(self, start: int, stop: int) -> Tensor:
        return self.stored("codes", start, stop).view(torch.uint8) ^ 128

    def zeros(self, start: int, stop: int) -> Tensor | None:
        return self.zeros_in_range(self.stored_zeros(start, stop)) if self.has("zeros") else None


class PackedMatrix(ScaledMatrix):
    by_rows = ("codes",)

    def __init__(self, source: StoredTensors, module: str, method: CompressedTensors):
        super().__init__(source, module, ".weight_packed", {"shape": ".weight_shape"})
        n, words = self.expect("codes", (torch.int32,), (-1, -1))
        self.expect("shape", (torch.int64, torch.int32), (2,))
        rows, k = self.stored("shape").tolist()
        fitting = [bits for bits in method.bits if words in (dense_words(k, bits), spaced_words(k, bits))]
        if len(fitting) != 1 or rows != n or k < 1:
            raise ValueError(
                f"tensor {self.parts['codes']!r} of shape {[n, words]} does not match the matrix {[rows, k]} of "
                f"{self.parts['shape']!r} and the bits in quantization_config: "
                f"{' or '.join(map(str, method.bits)) or 'none for integers'}"
            )
        self.shape = (n, k)
        [self.bits] = fitting
        self.dense = words == dense_words(k, self.bits)
        self.expect_scales(method)
        count = self.groups.count
        self.expect_zeros((dense_words(n, self.bits) if self.dense else spaced_words(n, self.bits), count))

    def codes(self, start: int, stop: int) -> Tensor:
        return self._fields(self.stored("codes", start, stop))[:, : self.shape[1]]

    def code_pairs(self, start: int, stop: int) -> Tensor:
        return as_bytes(self.stored("codes", start, stop))[:, : -(-self.shape[1] // 2)]

    def zeros(self, start: int, stop: int) -> Tensor | None:
        if not self.has("zeros"):
            return None
        if self.info("zeros")[0] != torch.int32:
            return self.zeros_in_range(self.stored_zeros(start, stop))
        # This number of rows fills whole words.
        rows, words = (32, self.bits) if self.dense else (32 // self.bits, 1)
        packed = self.stored("zeros", start // rows * words, min(-(-stop // rows) * words, self.info("zeros")[1][0]))
        return self._fields(packed.t())[:, start % rows :][:, : stop - start].t().to(torch.int16)

    def _fields(self, words: Tensor) -> Tensor:
        if not self.dense:
            fields = words[..., None] >> torch.arange(0, 32 - self.bits + 1, self.bits)
            return (fields & ((1 << self.bits) - 1)).to(torch.uint8).flatten(-2)
        padded = torch.nn.functional.pad(words, (0, -words.shape[-1] % self.bits)) if 8 % self.bits else words
        return unpack(padded, self.bits)


def dense_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def spaced_words(count: int, bits: int) -> int:
    return -(-count // (32 // bits))
