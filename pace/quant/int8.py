"""int8: integers from -127 to 127, with one scale per row or group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pace.ops.weight_layout import WeightLayout
from pace.quant.format import Format, normalize


@dataclass(frozen=True)
class Int8(Format):
    """`code = round(127 x / max|x|)`, `value = code * max|x| / 127`, over a row or over groups of it."""

    name: ClassVar[str] = "int8"
    group: int | None = None
    """Weights that share a scale, a multiple of 16. None gives one scale per row (output channel)."""

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout("int8", self.group)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        x, largest = normalize(x)
        return x.mul_(127).round_(), largest / 127, None
