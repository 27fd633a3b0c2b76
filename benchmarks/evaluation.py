"""Measures `pace eval` and `LLMModel.score` on many short texts: one by one, and all together in shared steps.

    python benchmarks/evaluation.py [--model PATH | --shape qwen2.5-0.5b] [--texts 200] [--tokens 40] [--rounds 3]

Texts are random tokens, from half to one and a half times `--tokens`. The two ways take turns. A figure is the median
of the rounds after the first, in predicted tokens per second. A shape (`pace bench --list`) gets random weights in
bf16.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.comparison.checkpoint import ensure_checkpoint  # noqa: E402
from pace.assets import TINY  # noqa: E402
from pace.eval import evaluate  # noqa: E402
from pace.llm import LLMModel  # noqa: E402

SCRIPT = "benchmarks/evaluation.py"


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = ensure_checkpoint(options.shape, Path(folder)) if options.shape else options.model
        with LLMModel(path, prefix_cache_bytes=0, progress=False) as model:
            texts = draw_texts(options.texts, options.tokens, model.config.vocab_size)
            rates = measure(model, texts, options.rounds)
    page.publish(None, SCRIPT, table(rates), {"model": options.shape or options.model, "rates": rates})


def draw_texts(num_texts: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [draw.randint(num_tokens // 2, num_tokens * 3 // 2) for _ in range(num_texts)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def measure(model: LLMModel, texts: list[list[int]], rounds: int) -> dict[str, float]:
    """Returns the predicted tokens per second of each way, by name."""

    def one_by_one(call: Callable[[list[list[int]]], object]) -> None:
        for text in texts:
            call([text])

    def evaluated(some: list[list[int]]) -> None:
        evaluate(model, some, progress=False)

    ways = {
        "`evaluate`, one by one": lambda: one_by_one(evaluated),
        "`evaluate`, together": lambda: evaluated(texts),
        "`score`, one by one": lambda: one_by_one(model.score),
        "`score`, together": lambda: model.score(texts),
    }
    num_predicted = sum(len(text) - 1 for text in texts)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first round warms up
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if turn:
                rates[name].append(num_predicted / (time.perf_counter() - began))
    return {name: round(statistics.median(found), 1) for name, found in rates.items()}


def table(rates: dict[str, float]) -> str:
    rows = [f"| {name} | {rate:,.0f} |" for name, rate in rates.items()]
    return "\n".join([f"`{page.command(SCRIPT)}`:", "", "| | tokens/s |", "|---|---:|", *rows, "", ""])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY), metavar="PATH", help="a checkpoint (default: the bundled one)")
    parser.add_argument("--shape", help="a shape with random weights, in place of a checkpoint")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
