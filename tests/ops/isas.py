"""Runs a test's body on several instruction sets of this CPU, one after another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from pace import _C
from tests.support import isas_of_floats

ALL = _C.available_isas()
FLOATS = isas_of_floats()
"""Tables with different float products."""
WIDE = next((isa for isa in ALL if "avx512" in isa or "amx" in isa), ALL[0])
VECTORS = [isa for isa in FLOATS if isa in (WIDE, "avx2", "generic")]
"""One table for each vector width. Operations other than products have the same source in all tables of a width;
`make test-all` runs them on all of FLOATS."""


def each_isa(names: Sequence[str] = VECTORS) -> Iterator[str]:
    """Selects each table in turn. Assertions in the loop should name it."""
    for name in names:
        _C.select_isa(name)
        yield name


def on_each_isa(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test once for each of VECTORS. A failure has a note that names the table."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        for name in each_isa():
            try:
                test(*arguments, **named)
            except BaseException as error:
                error.add_note(f"on {name}")
                raise

    return run
