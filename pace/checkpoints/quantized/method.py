"""Base class of quantised storage methods: the fields of `quantization_config` it reads, and how its matrices are
found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.checkpoints.quantized.stored import StoredMatrix, StoredTensors
from pace.naming import shown

MAX_GROUP = 1 << 24
"""Maximum group size; no row is longer."""


@dataclass(frozen=True)
class Method(ABC):
    """One `quant_method`, with its settings from config.json."""

    name: ClassVar[str]
    """Name of the method for messages."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Suffixes of a quantised module's tensors that are not used, such as static scales of activations."""

    @classmethod
    @abstractmethod
    def from_dict(cls, raw: dict[str, Any]) -> Method:
        """Reads a `quantization_config`. Raises ValueError for invalid values, NotImplementedError for unsupported
        ones."""

    @abstractmethod
    def matrices(self, source: StoredTensors) -> Iterator[StoredMatrix]:
        """Yields the quantised matrices of a checkpoint. Other tensors are left over. Raises ValueError if tensors
        contradict each other or the config."""


def modules_with(source: StoredTensors, *suffixes: str) -> list[str]:
    """Modules that have a tensor with one of these suffixes, without duplicates, in the order of the checkpoint."""
    return list(
        dict.fromkeys(
            name.removesuffix(suffix) for name in source.tensors for suffix in suffixes if name.endswith(suffix)
        )
    )


def modules_stored_as(source: StoredTensors, *dtypes: torch.dtype) -> list[str]:
    """Modules whose weight has one of these dtypes."""
    return [
        name.removesuffix(".weight")
        for name, (dtype, _) in source.tensors.items()
        if name.endswith(".weight") and dtype in dtypes
    ]


# -- fields of quantization_config --------------------------------------------------------------------------------


def wrong(field: str, allowed: str, value: Any) -> ValueError:
    return ValueError(f"config.json: quantization_config.{field} must be {allowed}; got {shown(value)}")


def refused(field: str, value: Any, advice: str) -> NotImplementedError:
    return NotImplementedError(
        f"config.json: quantization_config.{field} = {shown(value)} is not implemented; {advice}"
    )


def read_bits(raw: dict[str, Any], allowed: tuple[int, ...], field: str = "bits") -> int:
    bits = raw.get(field)
    if type(bits) is not int or bits not in allowed:
        *first, last = map(str, allowed)
        raise wrong(field, f"{', '.join(first)} or {last}" if first else last, bits)
    return bits


def read_group_size(raw: dict[str, Any], field: str = "group_size", default: int | None = None) -> int | None:
    """Reads a group size. None means whole rows, which the field gives as -1."""
    size = raw.get(field, default)
    if size is None or size == -1:
        return None
    if type(size) is not int or not 1 <= size <= MAX_GROUP:
        raise wrong(field, f"-1 (a whole row) or an integer in 1..{MAX_GROUP}", size)
    return size


def read_flag(raw: dict[str, Any], field: str, default: bool) -> bool:
    value = raw.get(field, default)
    if type(value) is not bool:
        raise wrong(field, "true or false", value)
    return value


def read_name(raw: dict[str, Any], field: str, default: str) -> str:
    """Reads a name in lower case; null stands for the default."""
    value = raw.get(field)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong(field, "a name", value)
    return value.lower()
