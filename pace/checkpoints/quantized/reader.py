"""A checkpoint that is quantised already, as `load_weights` sees it: each of its matrices is one tensor, however many
the files hold."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

from torch import Tensor

from pace.checkpoints.quantized import Method, StoredMatrix
from pace.checkpoints.reader import CheckpointReader, row_ranges
from pace.checkpoints.safetensors_file import TensorInfo
from pace.ops.weight_layout import QuantizedRows, WeightLayout

CACHE_SCALES = re.compile(
    r".*\.([qkv]_scale|kv_scale|prob_scale|[kv]_proj\.(output|[kv])_scale|[qkv]_zero_point|[kv]_proj\.output_zero_point)"
)
"""Scales of keys and values in 8 bits, made by calibration; the cache here makes its own for each token
(`kv_cache_dtype`)."""


PARTS_OF_QUANTIZED = (
    ".qweight",
    ".SCB",
    ".weight.absmax",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    "_blocks",
)
"""Endings of tensors that no checkpoint of floats has."""


def check_not_quantized(reader: CheckpointReader) -> None:
    """Raises ValueError for a quantised checkpoint whose config.json does not say so."""
    if name := next((name for name in reader.tensors if name.endswith(PARTS_OF_QUANTIZED)), None):
        raise ValueError(
            f"the weights in {reader.directory} are quantised (they have a tensor {name}), but its config.json has no quantization_config, which says how; "
            "take both from the same place"
        )


class QuantizedCheckpoint:
    """The tensors of a `CheckpointReader`, where `{module}.weight` stands for all that make up a quantised matrix: its
    dtype is a WeightLayout, and `read` gives QuantizedRows; or it is float32, where no layout has such groups. Threads may
    share one object.

    Raises ValueError where tensors are missing, have other shapes than they must, or nothing is quantised that should
    be; NotImplementedError for a layout that is not."""

    def __init__(self, reader: CheckpointReader, method: Method):
        self._reader = reader
        self._matrices: dict[str, StoredMatrix] = {}
        parts: dict[str, str] = {}
        """Name in the files -> the matrix that it belongs to."""
        for matrix in method.matrices(reader):
            self._matrices[matrix.name] = matrix
            parts |= dict.fromkeys(matrix.parts.values(), matrix.name)
            parts |= dict.fromkeys((matrix.module + suffix for suffix in method.unused), matrix.name)
        if not self._matrices:
            raise ValueError(
                f"config.json says that the checkpoint is quantised ({method.name}), but no tensor in {reader.directory} is; remove "
                "quantization_config if these are the original weights, or download the checkpoint again"
            )
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in reader.tensors.items():
            if name in parts:
                matrix = self._matrices[parts[name]]
                self.tensors[matrix.name] = TensorInfo(matrix.dtype, matrix.shape)
            elif name in self._matrices:
                raise ValueError(
                    f"the checkpoint has {name} quantised ({', '.join(self._matrices[name].parts.values())}) and not quantised; it must have one of them"
                )
            elif not CACHE_SCALES.fullmatch(name):
                self.tensors[name] = info

    def column_order(self, name: str) -> Tensor | None:
        """`QuantizedRows.order` of a quantised tensor's rows."""
        return self._matrices[name].order

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | QuantizedRows:
        """Rows [start, stop) of a tensor; raises ValueError for scales that are not finite."""
        if name not in self._matrices:
            return self._reader.read(name, start, stop)
        matrix = self._matrices[name]
        start, stop, _ = slice(start, stop).indices(matrix.num_rows)
        return matrix.read(start, stop)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Gives the memory of rows [start, stop) back."""
        if name not in self._matrices:
            return self._reader.release(name, start, stop)
        matrix = self._matrices[name]
        start, stop, _ = slice(start, stop).indices(matrix.num_rows)
        matrix.release(start, stop)

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        """Ranges [start, stop) of rows that cover a tensor; those of a quantised matrix are such that its codes are
        bounded, a byte each."""
        if name not in self._matrices:
            return self._reader.row_ranges(name)
        matrix = self._matrices[name]
        return row_ranges(matrix.num_rows, matrix.shape[-1] * (1 if isinstance(matrix.dtype, WeightLayout) else 4))

    @property
    def files(self) -> list[Path]:
        """Those that hold the tensors."""
        return self._reader.files

    @property
    def total_bytes(self) -> int:
        """Of all that `read` gives."""
        return sum(self._nbytes(name, info) for name, info in self.tensors.items())

    def _nbytes(self, name: str, info: TensorInfo) -> int:
        if not isinstance(info.dtype, WeightLayout):
            return info.nbytes
        *stack, k = info.shape
        scales = 4 * prod(stack) * info.dtype.num_groups(k) * (1 + info.dtype.has_mins)
        order = 0 if self.column_order(name) is None else 8 * k * len(self.row_ranges(name))
        return prod(info.shape) + scales + order

    def close(self) -> None:
        """Ends reading. Tensors that were read stay valid."""
        self._reader.close()

    def __enter__(self) -> QuantizedCheckpoint:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
