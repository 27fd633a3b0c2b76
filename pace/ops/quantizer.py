"""What `quantize` of `pace.ops` takes: a format of weights, as the operations see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pace.ops.weight_layout import QuantizedRows, WeightLayout


@dataclass(frozen=True, eq=False)
class QuantizerKernel:
    """A rule of csrc/kernels/quantize_weights.inl, and what it needs to know."""

    name: str
    """A key of `pace.ops.kernels.quantize.QUANTIZER_CODES`."""
    bounds: Tensor | None = None
    """float32, between ascending levels."""
    code_of_level: Tensor | None = None
    """uint8, of each ascending level; None: 0, 1, ..."""
    gives_final_scales: bool = True
    """False: they go through `Quantizer.final_scales`."""


class Quantizer(Protocol):
    """A format of `pace.quant`."""

    @property
    def layout(self) -> WeightLayout:
        """How rows are stored."""

    @property
    def kernel(self) -> QuantizerKernel | None:
        """What gives the bits of `quantize`; None: nothing does."""

    def quantize(self, rows: Tensor, name: str) -> QuantizedRows:
        """The definition, in plain torch. Raises ValueError that says `name` where an element is NaN or infinite."""

    def final_scales(self, scales: Tensor) -> Tensor:
        """What becomes of the scales `[R, groups]` of whole rows."""
