"""Registry of formats by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pace.naming import meant
from pace.ops.weight_layout import GRIDS
from pace.quant.block_types import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from pace.quant.format import Format
from pace.quant.fp8 import FP8
from pace.quant.int4 import Int4
from pace.quant.int8 import Int8
from pace.quant.k_types import Q2K, Q3K, Q4K, Q5K, Q6K
from pace.quant.microscaling import MXFP4, MXFP8
from pace.quant.nf4 import FP4, NF4
from pace.quant.ternary import Q1_0, Q2_0, TQ1_0, TQ2_0

FORMATS: dict[str, type[Format]] = {
    format.name: format
    for format in (
        *(Int8, Int4, NF4, FP4, MXFP4, MXFP8, FP8),
        *(Q2K, Q3K, Q4K, Q5K, Q6K),
        *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0),
        *(Q1_0, Q2_0, TQ1_0, TQ2_0),
    )
}

ONLY_IN_FILES = (*GRIDS, "iq4_nl", "iq4_xs")
"""ggml's types that files may have, but to which nothing is quantised."""


def read_format(format: str | Format, **options: Any) -> Format:
    """Returns the format with this name and these options, or `format` itself if it is a Format. Raises ValueError or
    TypeError that lists the known names."""
    if isinstance(format, Format):
        if options:
            raise TypeError(f"{format!r} already has options; give a format's name to set {', '.join(options)}")
        return format
    if not isinstance(format, str):
        raise TypeError(f"a format must be a Format or one of the names {', '.join(FORMATS)}; got {format!r:.200}")
    if format in ONLY_IN_FILES:
        raise ValueError(
            f"{format} exists only in GGUF files, which load as they are; pace does not quantise to it. "
            f"Known: {', '.join(FORMATS)}"
        )
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}{meant(format, FORMATS)} Known: {', '.join(FORMATS)}")
    kind = FORMATS[format]
    known = [field.name for field in fields(kind)]
    for name, value in options.items():
        if name not in known:
            options_there = f"It has {', '.join(known)}" if known else "It has none"
            raise TypeError(f"{format} has no option {name!r}{meant(name, known)} {options_there}")
        if name == "group" and not (value is None or (isinstance(value, int) and not isinstance(value, bool))):
            raise TypeError(f"group must be a number of weights or None for a whole row; got {value!r}")
        if name != "group" and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}")
    return kind(**options)
