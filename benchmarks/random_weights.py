"""Benchmarks of one shape with random weights, in one kind of weights after another: arguments, loop and table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks import page
from pace import _C
from pace.bench import measure
from pace.bench.result import Subject
from pace.bench.shapes import SHAPES


class Row(NamedTuple):
    """A measured row of the table."""

    case: str
    cells: list[str]
    """The cells after those of weights, case and instructions."""
    ratio: float
    """The case's number in the report."""


def make_parser(description: str | None, shape: str) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that `measure_rows` reads. `shape` is the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=shape, choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--layers", type=int, metavar="N", help="of the shape (default: all)")
    parser.add_argument("--weights", nargs="+", default=["bfloat16"], metavar="KIND")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    page.add_into_argument(parser)
    return parser


def measure_rows(
    script: str,
    options: argparse.Namespace,
    setting: str,
    columns: Sequence[str],
    rows_of: Callable[[Subject], Iterable[Row]],
) -> None:
    """Measures the rows of each kind of weights, and publishes them with a report of their ratios.

    `setting` is what the caption says after the shape. `columns`: the names of the case and of the cells.

    Raises the errors of `page.check_page` before anything is measured."""
    page.check_page(options.into, script)
    lines, report = [], {}
    for weights in options.weights:
        for row in rows_of(load(options.shape, weights, options.layers, options.threads)):
            lines.append(" | ".join([f"| {weights}", row.case, _C.isa(), *row.cells]) + " |")
            report[f"{weights}, {row.case}"] = round(row.ratio, 4)
            print(lines[-1], file=sys.stderr, flush=True)
    case, *measured = columns
    text = [
        f"`{page.command(script)}`: {options.shape}, {setting}, {_C.get_num_threads()} threads.\n",
        " | ".join(["| weights", case, "instructions", *measured]) + " |",
        "|---|---|---|" + "---:|" * len(measured),
        *lines,
    ]
    page.publish(options.into, script, "\n".join(text) + "\n\n", report)


def load(shape: str, weights: str, layers: int | None, threads: int | None) -> Subject:
    """Loads a shape with random weights: "bfloat16", or a quantisation. Raises as `measure.load`."""
    quantization = None if weights == "bfloat16" else weights
    return measure.load(shape, num_threads=threads, quantization=quantization, layers=layers)
