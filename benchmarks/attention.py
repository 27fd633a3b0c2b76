"""Measures attention of a decode step: its share of the step, and how fast it reads keys and values compared with the
read bandwidth.

    python benchmarks/attention.py --into benchmarks/RESULTS.md        # about 5 minutes on two cores, 3 GB of memory
    PACE_ISA=avx2 python benchmarks/attention.py --shape qwen2.5-0.5b --context 512 --kv-dtype bfloat16

Each step decodes one sequence whose cache holds `--context` positions of random keys and values. Weights are random,
and int8 by default (`--weights`). Every instruction of a step is timed. `share` is the time of attention, including the
work on heads before it, over the whole step. `GB/s` is the bytes of all keys and values over that time. `of the
bandwidth` is this over the read bandwidth, measured in the same run. The bandwidth of a shared machine drifts: all
contexts and caches take turns, and each number is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import add_into_argument, check_page, command, publish
from pace import _C
from pace.bench.measure import load, measure
from pace.bench.result import Subject
from pace.bench.shapes import SHAPES

SCRIPT = "benchmarks/attention.py"
PROMPT = 16
"""Tokens of the prompts, whose times are not used here."""


@dataclass(frozen=True)
class Row:
    """One run, or the medians of several."""

    milliseconds: float
    """Time of attention in a step, over all layers."""
    share: float
    gb_s: float
    of_bandwidth: float


def run(subject: Subject, context: int, steps: int) -> Row:
    result = measure(subject, PROMPT, steps, repeats=1, depth=context)
    _, seconds, num_bytes = result.decode.instructions["attention"]
    gb_s = num_bytes / seconds / 1e9
    return Row(1e3 * seconds, seconds / result.decode.seconds, gb_s, gb_s / result.limits.read_gb_s)


def medians(rows: list[Row]) -> Row:
    return Row(*(statistics.median(values) for values in zip(*map(astuple, rows))))


def table(rows: dict[tuple[str, str, int], Row], threads: int) -> str:
    lines = [
        f"`{command(SCRIPT)}` on `{_C.isa()}` with {threads} threads.\n",
        "| model | cache | positions | ms a step | share | GB/s | of the bandwidth |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (shape, kv_dtype, context), row in rows.items():
        lines.append(
            f"| {shape} | {kv_dtype} | {context:,} | {row.milliseconds:.2f} | {row.share:.1%} | {row.gb_s:.1f} "
            f"| {row.of_bandwidth:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen2.5-0.5b"], metavar="SHAPE")
    parser.add_argument("--weights", default="int8", help="a quantisation, or none (default: int8)")
    parser.add_argument("--kv-dtype", nargs="+", default=["bfloat16", "int8"], metavar="DTYPE")
    parser.add_argument("--context", nargs="+", type=int, default=[512, 4096, 8192, 16384, 32000], metavar="N")
    parser.add_argument("--steps", type=int, default=16, help="of each run (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="runs that a median is taken of (default: 5)")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: what `pace env` says")
    add_into_argument(parser)
    args = parser.parse_args()
    check_page(args.into, SCRIPT)
    quantization = None if args.weights == "none" else args.weights
    rows = {}
    for shape in args.shape:
        subjects = {
            name: load(shape, "bfloat16", "native", args.num_threads, name, quantization) for name in args.kv_dtype
        }
        runs = defaultdict(list)
        for _ in range(args.rounds):
            for context in args.context:
                for kv_dtype, subject in subjects.items():
                    runs[shape, kv_dtype, context].append(run(subject, context, args.steps))
        rows |= {point: medians(found) for point, found in runs.items()}
    publish(args.into, SCRIPT, table(rows, _C.get_num_threads()) + "\n")


if __name__ == "__main__":
    main()
