"""Measures decisions: many questions about one state, next to the state alone and to the questions one by one.

    python benchmarks/decisions.py [--into benchmarks/RESULTS.md] [--shape qwen2.5-0.5b] [--weights bfloat16 int8]

The model has random weights. The state is computed once, and each question continues it with tokens of its own. A
template that ends in a mark needs few of them, and the words of the plain prompt are some 25. Runs take turns, and a
ratio is the median over them. No run reuses the cache of another. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import random_weights  # noqa: E402
from benchmarks.random_weights import Row  # noqa: E402
from pace.bench.result import Subject  # noqa: E402
from pace.llm.clients.decisions import LabelLogits, LabelPlaces  # noqa: E402
from pace.llm.engine.driver import EngineDriver  # noqa: E402

SCRIPT = "benchmarks/decisions.py"
GOAL = 1.3
"""Time of all questions, relative to the prefix alone."""


def main() -> int:
    parser = random_weights.make_parser(__doc__, "qwen2.5-0.5b")
    parser.add_argument("--prefix", type=int, default=2000, metavar="N", help="tokens of the state (default: 2000)")
    parser.add_argument("--questions", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--own", type=int, nargs="+", default=[4, 8, 24], metavar="N", help="tokens of each question")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each kind (default: 3)")
    options = parser.parse_args()

    def rows_of(subject: Subject) -> Iterator[Row]:
        driver = EngineDriver(subject.engine)
        for own in options.own:
            found = times(driver, subject.model.vocab_size, own, options)
            alone, together, apart = (statistics.median(seconds) for seconds in found)
            ratio = statistics.median(all_ / one for one, all_ in zip(found[0], found[1]))
            cells = [f"{alone:.2f}", f"{together:.2f}", f"{ratio:.2f}", f"{GOAL:.2f}", f"{apart:.2f}"]
            yield Row(str(own), cells, ratio)
        driver.close()

    columns = ["tokens of a question", "prefix s", "all questions s", "ratio", "goal", "one alone s"]
    setting = f"{options.questions} questions, prefix of {options.prefix} tokens"
    random_weights.measure_rows(SCRIPT, options, setting, columns, rows_of)
    return 0


def times(
    driver: EngineDriver, vocab_size: int, own: int, options: argparse.Namespace
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the prefix alone, of all questions together, and of one question alone, in runs that take turns."""
    generator, salts = torch.Generator().manual_seed(0), itertools.count()
    prefix = torch.randint(vocab_size, (options.prefix,), generator=generator).tolist()
    tails = torch.randint(vocab_size, (options.questions, own), generator=generator).tolist()
    whole = [[*prefix, *tail] for tail in tails]
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(options.repeats + 1):  # the first is a warm-up
        for seconds, rows in zip(found, ([prefix], whole, whole[:1])):
            prompts = [LabelPlaces(row, [len(row) - 1], [[1, 2]]) for row in rows]
            started = time.perf_counter()
            LabelLogits(driver, prompts, cache_salt=f"run {next(salts)}").result()
            if number:
                seconds.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    sys.exit(main())
