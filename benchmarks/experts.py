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
import functools
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.random_weights import load, make_shapes_parser, measure_shapes  # noqa: E402
from pace.bench import measure  # noqa: E402
from pace.bench.result import Phase, Result, Subject  # noqa: E402

SCRIPT = "benchmarks/experts.py"
DENSE, DENSE_LAYERS = "llama-3.1-8b", 2
COLUMNS = ["decode t/s", "MBU", "experts GB/s", "of GB/s", "prompt t/s", "experts GFLOPS", "dense GFLOPS", "ratio"]


def main() -> int:
    options = make_shapes_parser(__doc__, "qwen3-30b-a3b", ["bfloat16", "int4"], layers=2).parse_args()

    @functools.lru_cache(maxsize=1)  # shapes take turns within a kind of weights
    def dense(weights: str) -> Subject:
        return load(DENSE, weights, DENSE_LAYERS, options.threads)

    def cells_of(shape: str, weights: str) -> list[str]:
        return cells(load(shape, weights, options.layers, options.threads), dense(weights), options)

    measure_shapes(SCRIPT, options, COLUMNS, cells_of)
    return 0


def cells(mixture: Subject, dense: Subject, options: argparse.Namespace) -> list[str]:
    """Measures both models, and returns the cells below `COLUMNS`."""
    results, of_experts, of_dense = [], [], []
    for _ in range(options.repeats):
        of_dense.append(rate(measure.measure(dense, options.prompt, 1, repeats=1), "linear"))
        results.append(measure.measure(mixture, options.prompt, options.generate, repeats=1))
        of_experts.append(rate(results[-1], "experts"))

    def median(value) -> float:
        return statistics.median(map(value, results))

    return [
        f"{median(lambda result: result.decode_tokens_per_second):.1f}",
        f"{median(lambda result: result.decode_mbu):.2f}",
        f"{median(lambda result: bandwidth(result.decode)):.1f}",
        f"{median(lambda result: result.limits.read_gb_s):.1f}",
        f"{median(lambda result: result.prefill_tokens_per_second):.0f}",
        f"{statistics.median(of_experts):.0f}",
        f"{statistics.median(of_dense):.0f}",
        f"{statistics.median(ours / theirs for ours, theirs in zip(of_experts, of_dense)):.2f}",
    ]


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
