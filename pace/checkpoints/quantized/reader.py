"""Presents a quantised checkpoint to `load_weights` with one tensor per matrix. The files may use several."""

from __future__ import annotations

import re
from math import prod

from torch import Tensor

from pace.checkpoints.quantized import Method, StoredMatrix
from pace.checkpoints.reader import CheckpointReader, OpenFiles, row_ranges
from pace.checkpoints.safetensors_file import TensorInfo
from pace.ops.weight_layout import QuantizedRows, WeightLayout

CACHE_SCALES = re.compile(
    r".*\.([qkv]_scale|kv_scale|prob_scale|[kv]_proj\.(output|[kv])_scale|[qkv]_zero_point|"
    r"[kv]_proj\.output_zero_point)"
)
"""Calibrated scales of an 8-bit KV cache. They are ignored, because the cache here computes its scales for each token
(`kv_cache_dtype`)."""


PARTS_OF_QUANTIZED = (
    *(".qweight", ".SCB", ".weight.absmax"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks"),
)
"""Suffixes of tensor names that only quantised checkpoints have."""


def check_not_quantized(reader: CheckpointReader) -> None:
    """Raises ValueError for a quantised checkpoint without a `quantization_config` in its config.json."""
    if name := next((name for name in reader.tensors if name.endswith(PARTS_OF_QUANTIZED)), None):
        raise ValueError(
            f"the weights in {reader.directory} are quantised (they have a tensor {name}), but its config.json has no "
            "quantization_config; take both from the same place"
        )


class QuantizedCheckpoint(OpenFiles):
    """The tensors of a `CheckpointReader`, with one tensor `{module}.weight` in place of the parts of a quantised
    matrix.

    The dtype of a quantised matrix is a WeightLayout, and `read` returns QuantizedRows. If no layout supports its
    groups, the dtype is float32. Threads may share one object.

    Raises ValueError if tensors are missing, have wrong shapes, or if nothing is quantised although it should be.
    Raises NotImplementedError for an unsupported layout."""

    def __init__(self, reader: CheckpointReader, method: Method):
        super().__init__(reader._files)
        self._reader = reader
        self._matrices: dict[str, StoredMatrix] = {}
        parts: dict[str, str] = {}
        """Name in the files -> name of its matrix."""
        for matrix in method.matrices(reader):
            self._matrices[matrix.name] = matrix
            parts |= dict.fromkeys(matrix.parts.values(), matrix.name)
            parts |= dict.fromkeys((matrix.module + suffix for suffix in method.unused), matrix.name)
        if not self._matrices:
            raise ValueError(
                f"config.json has a quantization_config ({method.name}), but no tensor in {reader.directory} is "
                "quantised; remove quantization_config if these are the original weights, or download them again"
            )
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in reader.tensors.items():
            if name in parts:
                matrix = self._matrices[parts[name]]
                self.tensors[matrix.name] = TensorInfo(matrix.dtype, matrix.shape)
            elif name in self._matrices:
                raise ValueError(
                    f"the checkpoint has {name} quantised ({', '.join(self._matrices[name].parts.values())}) "
                    "and not quantised; it must have only one of them"
                )
            elif not CACHE_SCALES.fullmatch(name):
                self.tensors[name] = info

    def column_order(self, name: str) -> Tensor | None:
        """`QuantizedRows.order` of a quantised tensor's rows, or None."""
        return self._matrices[name].order

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | QuantizedRows:
        """Reads rows [start, stop) of a tensor. Raises ValueError for scales that are not finite."""
        if name not in self._matrices:
            return self._reader.read(name, start, stop)
        matrix = self._matrices[name]
        start, stop, _ = slice(start, stop).indices(matrix.num_rows)
        return matrix.read(start, stop)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Frees the memory of rows [start, stop)."""
        if name not in self._matrices:
            return self._reader.release(name, start, stop)
        matrix = self._matrices[name]
        start, stop, _ = slice(start, stop).indices(matrix.num_rows)
        matrix.release(start, stop)

    def keep(self, name: str) -> None:
        matrix = self._matrices.get(name)
        for part in matrix.parts.values() if matrix else [name]:
            super().keep(part)

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        """Ranges [start, stop) of rows that cover a tensor. For a quantised matrix they bound the size of its codes, at
        one byte each."""
        if name not in self._matrices:
            return self._reader.row_ranges(name)
        matrix = self._matrices[name]
        return row_ranges(matrix.num_rows, matrix.shape[-1] * (1 if isinstance(matrix.dtype, WeightLayout) else 4))

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that `read` returns."""
        return sum(self._nbytes(name, info) for name, info in self.tensors.items())

    def _nbytes(self, name: str, info: TensorInfo) -> int:
        if not isinstance(info.dtype, WeightLayout):
            return info.nbytes
        *stack, k = info.shape
        scales = 4 * prod(stack) * info.dtype.num_groups(k) * (1 + info.dtype.has_mins)
        order = 0 if self.column_order(name) is None else 8 * k * len(self.row_ranges(name))
        return prod(info.shape) + scales + order
