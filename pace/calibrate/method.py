"""Methods that turn weights into codes, and the formats they support."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pace.calibrate import migration
from pace.quant import Format, Int4, Int8


@dataclass(frozen=True)
class Method:
    """A calibration method. Channel scales may be migrated first (`migration`, a name in `migration.KINDS`). Weights
    are then rounded to the nearest code, or column by column (GPTQ)."""

    migration: str | None = None
    rounding: str = "rtn"
    act_order: bool = True

    @property
    def is_calibrated(self) -> bool:
        return self.migration is not None or self.rounding == "gptq"

    def __str__(self) -> str:
        return "+".join(filter(None, (self.migration, self.rounding)))


METHODS = ("rtn", "gptq", "awq", "smoothquant", "awq+gptq", "smoothquant+gptq")
DEFAULT_METHODS = {"int4": "awq+gptq", "int8": "smoothquant"}


def read_method(name: str, act_order: bool | None = None) -> Method:
    """Reads a method's name. `act_order`: None means True. Raises ValueError for an unknown name, and if `act_order` is
    set for a method without GPTQ."""
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    first, _, second = name.partition("+")
    kind = first if first in migration.KINDS else None
    rounding = "gptq" if "gptq" in (first, second) else "rtn"
    if act_order is not None and rounding != "gptq":
        ordered = ", ".join(method for method in METHODS if "gptq" in method)
        raise ValueError(f"act_order={act_order} has no effect on the method {name}; leave it out, or use {ordered}")
    return Method(kind, rounding, act_order is not False)


def check_formats(formats: Iterable[Format]) -> None:
    """Raises ValueError for a format that no method supports."""
    for format in formats:
        if not isinstance(format, (Int4, Int8)):
            raise ValueError(
                f"only int4 and int8 are calibrated; {format.name} needs no calibration: load the original with "
                f"quantization={format.name!r}"
            )
        if isinstance(format, Int4) and not format.symmetric:
            raise ValueError(
                "zero points are not calibrated; leave int4 symmetric, or load the original with symmetric=False"
            )
