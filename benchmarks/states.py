"""Measures models with a state: the share of the recurrences in prefill, and MBU of decode with states counted.

    python benchmarks/states.py [--into benchmarks/RESULTS.md] [--shape qwen3.5-0.8b qwen3.5-4b] [--layers N]
    PACE_ISA=avx2 python benchmarks/states.py --into benchmarks/RESULTS.md        # the goal of 5 % is for AVX2

Weights are random. Every instruction of a prompt is timed. `recurrence` and `convolution` are their shares of the time
from the prompt to its first token. A decode step reads weights, keys and values, and it reads and writes the states:
`of its bytes` is the share of the states. A run of only some shapes, weights or instruction sets leaves the other rows
of a page unchanged.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.random_weights import load, make_shapes_parser, measure_shapes  # noqa: E402
from pace.bench import measure  # noqa: E402
from pace.bench.result import Result, Subject  # noqa: E402

SCRIPT = "benchmarks/states.py"
COLUMNS = ["prefill t/s", "MFU", "recurrence", "convolution", "decode t/s", "MBU", "states of its bytes"]
CAPTION = " Goals: a recurrence of at most 5 % on avx2, an MBU of at least 0.85."


def main() -> int:
    options = make_shapes_parser(__doc__, "qwen3.5-0.8b", ["bfloat16", "int8"]).parse_args()

    def cells_of(shape: str, weights: str) -> list[str]:
        return cells(load(shape, weights, options.layers, options.threads), options)

    measure_shapes(SCRIPT, options, COLUMNS, cells_of, CAPTION)
    return 0


def cells(subject: Subject, options: argparse.Namespace) -> list[str]:
    """Measures a model, and returns the cells below `COLUMNS`."""
    results = [measure.measure(subject, options.prompt, options.generate, repeats=1) for _ in range(options.repeats)]

    def median(value) -> float:
        return statistics.median(map(value, results))

    costs, context = subject.costs, results[0].context
    return [
        f"{median(lambda result: result.prefill_tokens_per_second):.0f}",
        f"{median(lambda result: result.prefill_mfu):.2f}",
        f"{median(lambda result: share(result, 'recurrence')):.1%}",
        f"{median(lambda result: share(result, 'convolution')):.1%}",
        f"{median(lambda result: result.decode_tokens_per_second):.1f}",
        f"{median(lambda result: result.decode_mbu):.2f}",
        f"{costs.state_traffic / costs.decode_bytes(1, context):.1%}",
    ]


def share(result: Result, kind: str) -> float:
    """Share of a kind of instruction in the time of a prefill."""
    _, seconds, _ = result.prefill.instructions.get(kind, (0, 0.0, 0.0))
    return seconds / result.prefill.seconds


if __name__ == "__main__":
    sys.exit(main())
