"""The interface of a quantisation format for `quantize` of `pace.ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pace.ops.weight_layout import QuantizedRows, WeightLayout


@dataclass(frozen=True, eq=False)
class QuantizerKernel:
    """A quantisation rule of csrc/kernels/quantize_weights.inl and its parameters."""

    name: str
    """A key of `pace.ops.kernels.quantize.QUANTIZER_CODES`."""
    bounds: Tensor | None = None
    """float32: boundaries between ascending levels."""
    code_of_level: Tensor | None = None
    """uint8: code of each ascending level; None for 0, 1, ..."""
    gives_final_scales: bool = True
    """False if the scales must go through `Quantizer.final_scales`."""


class Quantizer(Protocol):
    """A format of `pace.quant`."""

    @property
    def layout(self) -> WeightLayout:
        """The layout in which rows are stored."""

    @property
    def kernel(self) -> QuantizerKernel | None:
        """The kernel that gives the same bits as `quantize`; None if there is none."""

    def quantize(self, rows: Tensor, name: str) -> QuantizedRows:
        """The definition, in plain torch. Raises a ValueError that contains `name` if an element is NaN or infinite."""

    def final_scales(self, scales: Tensor) -> Tensor:
        """Converts the scales `[R, groups]` of whole rows to their final values."""
