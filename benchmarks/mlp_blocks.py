"""Would an MLP gain if its intermediate activations stayed in cache? The MLPs of a model's layers, one after the other,
as the program cuts them (all gates and ups, then all downs) and in blocks of the intermediate: gates and ups of some
columns, then their share of down, added to the output.

    python benchmarks/mlp_blocks.py [--into benchmarks/RESULTS.md] [--shape qwen2.5-0.5b llama-3.2-1b]

Both run the same kernels on buffers that are there already. The two take turns; a ratio is the median over the pairs.
Products of quantised inputs differ, as groups of a block are those of the whole only where its width is a multiple of
128; the time does not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.kernels import STORED, random_weight  # noqa: E402
from pace import _C  # noqa: E402
from pace.bench.shapes import SHAPES  # noqa: E402
from pace.llm.models.model_list import read_config  # noqa: E402
from pace.llm.models.model_utils import use_threads  # noqa: E402
from pace.ops.kernels.linear import ACTIVATION_CODES  # noqa: E402
from pace.ops.weight import PackedWeight  # noqa: E402

SCRIPT = "benchmarks/mlp_blocks.py"
LAYERS = 8
"""Whose weights take turns, so that they come from memory as in a model."""
WIDTHS = (512, 1024, 2048)
"""Columns of the intermediate in a block."""
Layer = list[tuple[PackedWeight, PackedWeight]]
"""The weight of gate and up and that of down, for each block."""


class MLPs:
    """Layers cut into blocks of `width` columns."""

    def __init__(self, hidden: int, inner: int, width: int, dtype: str) -> None:
        widths = [min(width, inner - start) for start in range(0, inner, width)]
        self.hidden, self.width = hidden, width
        self.layers: list[Layer] = [
            [
                (
                    random_weight(2 * columns, hidden, STORED[dtype], True),
                    random_weight(hidden, columns, STORED[dtype], False),
                )
                for columns in widths
            ]
            for _ in range(LAYERS)
        ]

    def runner(self, rows: int) -> Callable[[], None]:
        x, out = torch.randn(rows, self.hidden), torch.zeros(rows, self.hidden)
        between = torch.empty(rows, self.width)
        silu = ACTIVATION_CODES["silu"]

        def run() -> None:
            for blocks in self.layers:
                for index, (up, down) in enumerate(blocks):
                    product(x, self.hidden, rows, up, silu, 0, between)
                    product(between, down.k, rows, down, 0, out.data_ptr() if index else 0, out)

        return run


def product(
    x: torch.Tensor, stride: int, rows: int, weight: PackedWeight, code: int, residual: int, out: torch.Tensor
) -> None:
    _C.linear(x.data_ptr(), stride, rows, weight.address, weight.order_address, 0, code, residual, out.data_ptr())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["qwen2.5-0.5b", "llama-3.2-1b"], choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8", "q4_k"], choices=STORED)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 128, 512], metavar="N")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="pairs (default: 15)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    threads = use_threads(options.threads)
    lines = [
        f"`{page.command(SCRIPT)}` on `{_C.isa()}` with {threads} threads. Milliseconds of {LAYERS} MLPs as the program "
        "cuts them, and how many times as fast they are in blocks of so many columns.\n",
        "| shape | weights | rows | whole, ms | " + " | ".join(map(str, WIDTHS)) + " |",
        "|---|---|---:|---:|" + "---:|" * len(WIDTHS),
    ]
    for shape in options.shape:
        _, config = read_config(SHAPES[shape])
        hidden, inner = config.hidden_size, config.intermediate_size
        for dtype in options.dtype:
            cuts = [MLPs(hidden, inner, width, dtype) for width in (inner, *WIDTHS)]
            for rows in options.rows:
                whole, *blocks = [cut.runner(rows) for cut in cuts]
                measured = [compare(whole, cut, options.repeats) for cut in blocks]
                cells = [f"{1e3 * measured[0][0]:.2f}", *(f"{ratio:.3f}" for _, ratio in measured)]
                lines.append(f"| {shape} | {dtype} | {rows} | " + " | ".join(cells) + " |")
                print(lines[-1], file=sys.stderr, flush=True)
    page.publish(options.into, SCRIPT, "\n".join(lines) + "\n\n")
    return 0


def compare(whole: Callable[[], None], blocks: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds of `whole`, and its time over that of `blocks`: medians."""
    seconds, ratios = [], []
    for number in range(repeats + 1):
        first, second = (whole, blocks) if number % 2 else (blocks, whole)
        times = {run: timed(run) for run in (first, second)}
        if number:
            seconds.append(times[whole])
            ratios.append(times[whole] / times[blocks])
    return statistics.median(seconds), statistics.median(ratios)


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
