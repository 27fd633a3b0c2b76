"""GPTQ, as AutoGPTQ and GPTQModel store it.

    qweight int32 [K bits / 32, N]    u, along K: the fields of a column follow each other, the lowest bits first

    qzeros  int32 [G, N bits / 32]    zero points along N: less 1 in version 1 ("gptq"), unchanged in "gptq_v2"

    scales  float [G, N]

    g_idx   int32 [K]                 the group of each input; in any order if quantised by activation (desc_act)

    W[n, k] = (u[k, n] - zero[g_idx[k], n]) * scales[g_idx[k], n]

The shapes of a module's tensors give its bits and its group size, so the patterns of `dynamic` are not needed.

Source: the code of GPTQModel, https://github.com/ModelCloud/GPTQModel"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.checkpoints.quantized.method import (
    Method,
    modules_with,
    read_bits,
    read_flag,
    read_group_size,
    read_name,
    refused,
    wrong,
)
from pace.checkpoints.quantized.stored import FLOATS, Groups, IntegerMatrix, StoredTensors, as_bytes, unpack

logger = logging.getLogger("pace")

BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 2}
STEP = 4096
"""Number of rows whose zero points are checked at a time; a multiple of 32."""


@dataclass(frozen=True)
class GPTQ(Method):
    name: ClassVar[str] = "GPTQ"

    bits: int
    group_sizes: tuple[int | None, ...]
    """The default size, then those of `dynamic`. None means whole columns of qweight, which are rows of the matrix."""
    version: int
    """In version 1 zero points are stored less 1."""
    uniform: bool
    """True if all quantised modules use `bits` and the same group size."""
    desc_act: bool
    """True if columns may be in groups in any order, given by g_idx."""
    says_symmetric: bool
    """True if the config states that all modules are symmetric."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> GPTQ:
        checkpoint_format = read_name(raw, "checkpoint_format", read_name(raw, "format", "gptq"))
        if checkpoint_format not in FORMATS:
            raise refused(
                "checkpoint_format",
                checkpoint_format,
                f"implemented: {', '.join(FORMATS)}; save the model in one of these, or take the original",
            )
        if raw.get("is_marlin_format"):
            raise refused("is_marlin_format", True, "take the checkpoint in the format gptq, or the original")
        if read_name(raw, "pack_dtype", "int32") != "int32":
            raise refused("pack_dtype", raw["pack_dtype"], "int32 is; take the original checkpoint")
        if raw.get("rotation"):
            raise refused(
                "rotation", raw["rotation"], "it would rotate the model's inputs; take the original checkpoint"
            )
        dynamic = raw.get("dynamic") or {}
        if not isinstance(dynamic, dict) or not all(isinstance(fields or {}, dict) for fields in dynamic.values()):
            raise wrong("dynamic", "an object of objects, or null", dynamic)
        sizes = [
            read_group_size(fields, default=-1)
            for fields in (raw, *(fields for fields in dynamic.values() if fields and "group_size" in fields))
        ]
        return cls(
            bits=read_bits(raw, BITS),
            group_sizes=tuple(dict.fromkeys(sizes)),
            version=FORMATS[checkpoint_format],
            uniform=not dynamic,
            desc_act=read_flag(raw, "desc_act", False),
            says_symmetric=read_flag(raw, "sym", False) and not any("sym" in (of or {}) for of in dynamic.values()),
        )

    def matrices(self, source: StoredTensors) -> Iterator[GPTQMatrix]:
        warned = not self.says_symmetric
        for module in modules_with(source, ".qweight"):
            matrix = GPTQMatrix(source, module, self)
            if not (warned or matrix.symmetric):
                logger.warning(
                    "quantization_config.sym is true, but zero points differ, first in %s. The zero points are used; "
                    "if the model writes nonsense, the checkpoint is wrong",
                    matrix.parts["zeros"],
                )
                warned = True
            yield matrix


class GPTQMatrix(IntegerMatrix):
    def __init__(self, source: StoredTensors, module: str, method: GPTQ):
        parts = {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}
        super().__init__(source, module, parts, optional={"groups": ".g_idx"})
        height, n = self.expect("codes", (torch.int32,), (-1, -1))
        count, _ = self.expect("scales", FLOATS, (-1, n))
        _, zero_words = self.expect("zeros", (torch.int32,), (count, -1))
        self.bits = method.bits if method.uniform else 32 * zero_words // max(1, n)
        if (
            self.bits not in BITS
            or 32 * zero_words != n * self.bits
            or 32 * height % self.bits
            or min(n, height, count) < 1
        ):
            raise ValueError(
                f"{module}: qweight {[height, n]} and qzeros {[count, zero_words]} do not have the "
                f"{method.bits if method.uniform else '2, 3, 4 or 8'} bits in quantization_config; download the "
                "checkpoint again"
            )
        self.version = method.version
        self.shape = (n, 32 * height // self.bits)
        self.groups = self._read_groups(method, count)
        self.symmetric = self._are_zeros(middle := 1 << (self.bits - 1))
        if method.says_symmetric and not self.symmetric:
            self._refuse_one_zero_point(middle)
        source.release_stored(self.parts["zeros"])
        self.choose_layout(self.symmetric)

    def _are_zeros(self, value: int) -> bool:
        """True if all zero points are `value`. Checked regardless of the config's `sym`, because the check is cheap and
        `sym` may be wrong."""
        n = self.shape[0]
        return all((self._stored_zeros(row, min(row + STEP, n)) == value).all() for row in range(0, n, STEP))

    def _refuse_one_zero_point(self, middle: int) -> None:
        """Raises ValueError if a checkpoint claims to be symmetric, but all its zero points are the same other value.

        No method produces such zero points. They were stored as in the other version, or never set, as kernels that
        rely on `sym` do not read them."""
        zero = int(self._stored_zeros(0, 1)[0, 0])
        if not self._are_zeros(zero):
            return
        other = {1: "gptq_v2", 2: "gptq"}[self.version]
        advice = "take another checkpoint of this model"
        if zero - middle == (1 if self.version == 1 else -1):
            setting = f'"checkpoint_format": "{other}"'
            advice = f"if they are stored as in {other}, set {setting} in quantization_config; or {advice}"
        raise ValueError(
            f"quantization_config.sym is true, which means zero points of {middle}, but all in tensor "
            f"{self.parts['zeros']!r} are {zero}, and such weights would be noise; {advice}"
        )

    def _read_groups(self, method: GPTQ, count: int) -> Groups:
        k = self.shape[1]
        sizes = [size or k for size in method.group_sizes]
        size = next((size for size in sizes if -(-k // size) == count), None)
        if size is None:
            made = " or ".join(str(-(-k // size)) for size in sizes)
            raise ValueError(
                f"tensor {self.parts['scales']!r} has {count} groups; quantization_config.group_size makes {made} "
                f"of {k} inputs"
            )
        if not self.has("groups"):
            if method.desc_act:
                raise ValueError(
                    f"quantization_config.desc_act needs the tensor {self.module}.g_idx, which the checkpoint lacks"
                )
            return Groups(k, count, size)
        index = self.group_index(count)
        if not method.desc_act and not index.any():  # some writers leave zeros there
            return Groups(k, count, size)
        return Groups(k, count, size, index)

    def codes(self, start: int, stop: int) -> Tensor:
        return unpack(self.columns("codes", start, stop), self.bits)

    def code_pairs(self, start: int, stop: int) -> Tensor:
        return as_bytes(self.columns("codes", start, stop))

    def scales(self, start: int, stop: int) -> Tensor:
        return self.finite("scales", self.columns("scales", start, stop))

    def zeros(self, start: int, stop: int) -> Tensor | None:
        return None if self.symmetric else self._stored_zeros(start, stop)

    def _stored_zeros(self, start: int, stop: int) -> Tensor:
        first, last = start // 32 * self.bits, -(-stop // 32) * self.bits  # words, in units of 32 zero points
        words = self.columns("zeros", first, min(last, self.info("zeros")[1][1])).t()
        if self.version == 1 and self.bits != 3:
            # Adds to whole words with carries, as GPTQModel does. This undoes GPTQModel's subtraction even if a zero
            # point is 0.
            words = words + sum(1 << shift for shift in range(0, 32, self.bits))
        zeros = unpack(words, self.bits)[:, start % 32 :][:, : stop - start].t().to(torch.int16)
        return (zeros + 1) % 8 if self.version == 1 and self.bits == 3 else zeros
