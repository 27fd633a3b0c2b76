"""BitNet b1.58: weights -1, 0 and 1 times one scale, and inputs rounded to int8 with one scale for each token. Both are
part of the model, which was trained with them.

    weight         uint8 [N / 4, K]    four rows in one: two bits each, plus 1, lowest first

                   floats [N, K]       -1, 0 and 1

    weight_scale   [1]                 linear_class bitlinear:       W = weight / weight_scale

                                       linear_class autobitlinear:   W = weight * weight_scale

Row i of bytes holds the rows i + j N / 4 for j = 0 .. 3.

With quantization_mode `online`, the file has the floats of training, and no scale:

    scale = 1 / max(mean |weight|, 1e-5)    W[n, k] = clamp(round(weight[n, k] * scale), -1, 1) / scale"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.checkpoints.quantized.method import Method, modules_with, read_flag, read_name, refused, wrong
from pace.checkpoints.quantized.stored import FLOATS, PIECE_BYTES, StoredMatrix, StoredTensors
from pace.ops.weight_layout import QuantizedRows, WeightLayout

TERNARY = WeightLayout("int2", None, offset=1, token_inputs=True)
PLANES = 4
"""Rows in a byte."""


@dataclass(frozen=True)
class BitNet(Method):
    name: ClassVar[str] = "bitnet"

    multiplies_scale: bool
    """True if weights are multiplied by `weight_scale`, False if they are divided by it."""
    online: bool
    kept: tuple[str, ...] | None
    """Patterns of modules that stay floats, for `online`."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> BitNet:
        linear = read_name(raw, "linear_class", "bitlinear")
        mode = read_name(raw, "quantization_mode", "offline")
        for field, value, allowed in (
            ("linear_class", linear, ("bitlinear", "autobitlinear")),
            ("quantization_mode", mode, ("offline", "online")),
        ):
            if value not in allowed:
                raise wrong(field, " or ".join(allowed), raw[field])
        if read_flag(raw, "use_rms_norm", False):
            raise refused("use_rms_norm", True, "no norms of single products are")
        kept = raw.get("modules_to_not_convert")
        if kept is not None and not (isinstance(kept, list) and all(isinstance(pattern, str) for pattern in kept)):
            raise wrong("modules_to_not_convert", "a list of names or null", kept)
        is_auto = linear == "autobitlinear"
        return cls(is_auto, is_auto and mode == "online", None if kept is None else tuple(kept))

    def matrices(self, source: StoredTensors) -> Iterator[StoredMatrix]:
        if not self.online:
            for module in modules_with(source, ".weight_scale"):
                is_packed = source.tensors.get(f"{module}.weight", (None,))[0] == torch.uint8
                yield (PackedMatrix if is_packed else FloatMatrix)(source, module, self.multiplies_scale)
            return
        for name, (dtype, shape) in source.tensors.items():
            module = name.removesuffix(".weight")
            if ".layers." in name and module != name and len(shape) == 2 and dtype in FLOATS and self.converts(module):
                yield OnlineMatrix(source, module)

    def converts(self, module: str) -> bool:
        """False if a pattern of `kept` matches: a regular expression up to the end of a part of the name, or its
        end."""
        for pattern in self.kept or ():
            try:
                found = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module)
            except re.error as error:
                raise wrong("modules_to_not_convert", f"regular expressions ({error})", pattern) from None
            if found or module.endswith(pattern):
                return False
        return True


class OfflineMatrix(StoredMatrix):
    """A matrix with a `weight_scale`."""

    dtype = TERNARY

    def __init__(self, source: StoredTensors, module: str, multiplies_scale: bool):
        super().__init__(source, module, {"codes": ".weight", "scale": ".weight_scale"})
        self.expect("scale", FLOATS, (1,), ())
        self.multiplies_scale = multiplies_scale

    def rows_of(self, codes: Tensor) -> QuantizedRows:
        scale = self.stored("scale").float().reshape(())
        scale = self.finite("scale", scale if self.multiplies_scale else 1 / scale)
        return QuantizedRows(TERNARY, codes, scale.expand(len(codes), 1).contiguous())


class PackedMatrix(OfflineMatrix):
    """Four rows in a byte."""

    def __init__(self, source: StoredTensors, module: str, multiplies_scale: bool):
        super().__init__(source, module, multiplies_scale)
        self.quarter, k = self.expect("codes", (torch.uint8,), (-1, -1))
        self.shape = (PLANES * self.quarter, k)

    def read(self, start: int, stop: int) -> QuantizedRows:
        codes = torch.empty(stop - start, self.shape[1], dtype=torch.uint8)
        for plane in range(PLANES):
            before = plane * self.quarter
            first, last = max(start, before), min(stop, before + self.quarter)
            if first < last:
                packed = self.stored("codes", first - before, last - before)
                codes[first - start : last - start] = packed >> 2 * plane & 3
        return self.rows_of(codes)


class FloatMatrix(OfflineMatrix):
    """Floats -1, 0 and 1, as transformers saves a model that it has read."""

    by_rows = ("codes",)

    def __init__(self, source: StoredTensors, module: str, multiplies_scale: bool):
        super().__init__(source, module, multiplies_scale)
        self.shape = self.expect("codes", FLOATS, (-1, -1))

    def read(self, start: int, stop: int) -> QuantizedRows:
        levels = self.rows("codes", start, stop)
        codes = (levels + 1).to(torch.uint8)
        if not torch.equal(codes.to(levels.dtype) - 1, levels) or (codes.numel() and codes.max() > 2):
            raise ValueError(f"tensor {self.parts['codes']!r} next to a weight_scale must hold only -1, 0 and 1")
        return self.rows_of(codes)


class OnlineMatrix(StoredMatrix):
    """Floats that become three levels when they are read."""

    by_rows = ("floats",)
    dtype = TERNARY

    def __init__(self, source: StoredTensors, module: str):
        super().__init__(source, module, {"floats": ".weight"})
        self.shape = self.expect("floats", FLOATS, (-1, -1))
        self._scale: Tensor | None = None
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> QuantizedRows:
        scale = self.scale()
        levels = (self.rows("floats", start, stop).float() * scale).round_().clamp_(-1, 1)
        codes = levels.add_(1).to(torch.uint8)
        return QuantizedRows(TERNARY, codes, (1 / scale).expand(len(codes), 1).contiguous())

    def scale(self) -> Tensor:
        """The inverse of the mean magnitude of the whole matrix, which is read once for it."""
        with self._lock:
            if self._scale is None:
                n, k = self.shape
                total = torch.zeros((), dtype=torch.float64)
                step = max(1, PIECE_BYTES // max(1, 4 * k))
                for first in range(0, n, step):
                    rows = self.stored("floats", first, min(n, first + step))
                    total += rows.float().abs().sum(dtype=torch.float64)
                mean = self.finite("floats", total / max(1, n * k))
                self._scale = 1 / mean.clamp(min=1e-5)
            return self._scale
