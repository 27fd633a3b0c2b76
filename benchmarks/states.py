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

from benchmarks import page  # noqa: E402
from benchmarks.random_weights import load  # noqa: E402
from pace import _C  # noqa: E402
from pace.bench import measure  # noqa: E402
from pace.bench.result import Result, Subject  # noqa: E402
from pace.bench.shapes import SHAPES  # noqa: E402

SCRIPT = "benchmarks/states.py"
HEADER = ["shape", "layers", "weights", "instructions", "prefill t/s", "MFU", "recurrence", "convolution"]
HEADER += ["decode t/s", "MBU", "states of its bytes"]
KEYS = 4
"""Number of columns that identify a row."""
RECURRENCE_GOAL, MBU_GOAL = 0.05, 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3.5-0.8b"], choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--layers", type=int, metavar="N", help="of each shape (default: all)")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", "int8"], metavar="KIND")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens (default: 512)")
    parser.add_argument("--generate", type=int, default=32, metavar="N", help="decode steps (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    rows = page.earlier_rows(options.into, SCRIPT, KEYS)
    for shape in options.shape:
        for weights in options.weights:
            new = row(load(shape, weights, options.layers, options.threads), shape, weights, options)
            rows[shape, str(options.layers or "all"), weights, _C.isa()] = new
            print(new, file=sys.stderr, flush=True)
    text = [
        f"`{page.command(SCRIPT)}` with {_C.get_num_threads()} threads; rows that this command does not "
        f"name are of an earlier one. Goals: a recurrence of at most {RECURRENCE_GOAL:.0%} on avx2, an MBU of at least "
        f"{MBU_GOAL}.\n",
        "| " + " | ".join(HEADER) + " |",
        "|---|---:|---|---|" + "---:|" * (len(HEADER) - KEYS),
        *rows.values(),
    ]
    page.publish(options.into, SCRIPT, "\n".join(text) + "\n\n")
    return 0


def row(subject: Subject, shape: str, weights: str, options: argparse.Namespace) -> str:
    results = [measure.measure(subject, options.prompt, options.generate, repeats=1) for _ in range(options.repeats)]

    def median(value) -> float:
        return statistics.median(map(value, results))

    costs, context = subject.costs, results[0].context
    cells = [
        f"{median(lambda result: result.prefill_tokens_per_second):.0f}",
        f"{median(lambda result: result.prefill_mfu):.2f}",
        f"{median(lambda result: share(result, 'recurrence')):.1%}",
        f"{median(lambda result: share(result, 'convolution')):.1%}",
        f"{median(lambda result: result.decode_tokens_per_second):.1f}",
        f"{median(lambda result: result.decode_mbu):.2f}",
        f"{costs.state_traffic / costs.decode_bytes(1, context):.1%}",
    ]
    return " | ".join([f"| {shape}", str(options.layers or "all"), weights, _C.isa(), *cells]) + " |"


def share(result: Result, kind: str) -> float:
    """Share of a kind of instruction in the time of a prefill."""
    _, seconds, _ = result.prefill.instructions.get(kind, (0, 0.0, 0.0))
    return seconds / result.prefill.seconds


if __name__ == "__main__":
    sys.exit(main())
