"""Measures the cost of experts in decode and prefill of a mixture.

Decode is compared with the read bandwidth, counting only chosen experts. The products of experts over a prompt are
compared with those of a dense model in the same kind of weights.

    python benchmarks/experts.py [--into benchmarks/RESULTS.md] [--shape qwen3-30b-a3b gpt-oss-20b]

Each shape is a slice of a few layers with random weights. The dense model is two layers of DENSE. Prompts of the two
models take turns, with every instruction timed; a ratio is the median over the pairs. A run of only some shapes or
weights leaves the other rows of a page unchanged.
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
from pace.bench.result import Phase, Result, Subject  # noqa: E402
from pace.bench.shapes import SHAPES  # noqa: E402
from pace.llm.loading.options import use_threads  # noqa: E402

SCRIPT = "benchmarks/experts.py"
DENSE, DENSE_LAYERS = "llama-3.1-8b", 2
HEADER = [
    "shape",
    "layers",
    "weights",
    "instructions",
    "decode t/s",
    "MBU",
    "experts GB/s",
    "of GB/s",
    "prompt t/s",
    "experts GFLOPS",
    "dense GFLOPS",
    "ratio",
]
KEYS = 4
"""Number of columns that identify a row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen3-30b-a3b"], choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of each shape (default: 2)")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", "int4"], metavar="KIND")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens (default: 512)")
    parser.add_argument("--generate", type=int, default=32, metavar="N", help="decode steps (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    use_threads(options.threads)
    rows = page.earlier_rows(options.into, SCRIPT, KEYS)
    for weights in options.weights:
        dense = load(DENSE, weights, DENSE_LAYERS, options.threads)
        for shape in options.shape:
            mixture = load(shape, weights, options.layers, options.threads)
            new = row(mixture, dense, shape, weights, options)
            rows[shape, str(options.layers), weights, _C.isa()] = new
            print(new, file=sys.stderr, flush=True)
    text = [
        f"`{page.command(SCRIPT)}` with {_C.get_num_threads()} threads; rows that this command does not "
        "name are of an earlier one.\n",
        "| " + " | ".join(HEADER) + " |",
        "|---|---:|---|---|" + "---:|" * (len(HEADER) - KEYS),
        *rows.values(),
    ]
    page.publish(options.into, SCRIPT, "\n".join(text) + "\n\n")
    return 0


def row(mixture: Subject, dense: Subject, shape: str, weights: str, options: argparse.Namespace) -> str:
    results, of_experts, of_dense = [], [], []
    for _ in range(options.repeats):
        of_dense.append(rate(measure.measure(dense, options.prompt, 1, repeats=1), "linear"))
        results.append(measure.measure(mixture, options.prompt, options.generate, repeats=1))
        of_experts.append(rate(results[-1], "experts"))

    def median(value) -> float:
        return statistics.median(map(value, results))

    cells = [
        f"{median(lambda result: result.decode_tokens_per_second):.1f}",
        f"{median(lambda result: result.decode_mbu):.2f}",
        f"{median(lambda result: bandwidth(result.decode)):.1f}",
        f"{median(lambda result: result.limits.read_gb_s):.1f}",
        f"{median(lambda result: result.prefill_tokens_per_second):.0f}",
        f"{statistics.median(of_experts):.0f}",
        f"{statistics.median(of_dense):.0f}",
        f"{statistics.median(ours / theirs for ours, theirs in zip(of_experts, of_dense)):.2f}",
    ]
    return " | ".join([f"| {shape}", str(options.layers), weights, _C.isa(), *cells]) + " |"


def rate(result: Result, kind: str) -> float:
    """GFLOPS of the layers' products of a kind over the prompt."""
    costs = result.costs
    per_token = sum(layer.chosen * layer.flops_each for layer in costs.experts) if kind == "experts" else None
    head = f"linear {result.subject.model.vocab_size} x "
    seconds = sum(
        seconds
        for name, (_, seconds, _) in result.prefill.instructions.items()
        if name.startswith(kind) and not name.startswith(head)
    )
    return result.prompt * (per_token or costs.layer_flops_per_token) / seconds / 1e9


def bandwidth(phase: Phase) -> float:
    """GB/s at which a decode step reads experts."""
    experts = [part for name, part in phase.instructions.items() if name.startswith("experts")]
    return sum(num_bytes for _, _, num_bytes in experts) / sum(seconds for _, seconds, _ in experts) / 1e9


if __name__ == "__main__":
    sys.exit(main())
