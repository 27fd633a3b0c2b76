"""Benchmarks of shapes with random weights, in one kind of weights after another: arguments, loop and table."""

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
from pace.llm.loading.options import use_threads


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


def make_shapes_parser(
    description: str | None, shape: str, weights: list[str], layers: int | None = None
) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that `measure_shapes` reads, and of the sizes of a measurement. `shape`,
    `weights` and `layers` are the defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=[shape], choices=SHAPES, metavar="SHAPE")
    explanation = f"of each shape (default: {layers or 'all'})"
    parser.add_argument("--layers", type=int, default=layers, metavar="N", help=explanation)
    parser.add_argument("--weights", nargs="+", default=weights, metavar="KIND")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens (default: 512)")
    parser.add_argument("--generate", type=int, default=32, metavar="N", help="decode steps (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    page.add_into_argument(parser)
    return parser


SHAPE_KEYS = ["shape", "layers", "weights", "instructions"]
"""The columns that identify a row of `measure_shapes`."""


def measure_shapes(
    script: str,
    options: argparse.Namespace,
    columns: Sequence[str],
    cells_of: Callable[[str, str], list[str]],
    caption: str = "",
) -> None:
    """Measures a row of each kind of weights and each shape, and publishes the rows. Those of a page that are not
    measured stay. `cells_of(shape, weights)` returns the cells below `columns`.

    Raises the errors of `page.check_page` before anything is measured."""
    page.check_page(options.into, script)
    use_threads(options.threads)
    rows = page.earlier_rows(options.into, script, len(SHAPE_KEYS))
    for weights in options.weights:
        for shape in options.shape:
            key = (shape, str(options.layers or "all"), weights, _C.isa())
            rows[key] = " | ".join([f"| {shape}", *key[1:], *cells_of(shape, weights)]) + " |"
            print(rows[key], file=sys.stderr, flush=True)
    text = [
        f"`{page.command(script)}` with {_C.get_num_threads()} threads; rows that this command does not "
        f"name are of an earlier one.{caption}\n",
        "| " + " | ".join([*SHAPE_KEYS, *columns]) + " |",
        "|---|---:|---|---|" + "---:|" * len(columns),
        *rows.values(),
    ]
    page.publish(options.into, script, "\n".join(text) + "\n\n")


def load(shape: str, weights: str, layers: int | None, threads: int | None) -> Subject:
    """Loads a shape with random weights: "bfloat16", or a quantisation. Raises as `measure.load`."""
    quantization = None if weights == "bfloat16" else weights
    return measure.load(shape, num_threads=threads, quantization=quantization, layers=layers)
