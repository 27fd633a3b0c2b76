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
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from pace import _C  # noqa: E402
from pace.bench import measure  # noqa: E402
from pace.bench.shapes import SHAPES  # noqa: E402
from pace.llm.clients.decisions import LabelLogits, LabelPlaces  # noqa: E402
from pace.llm.engine.driver import EngineDriver  # noqa: E402
from pace.llm.loading.options import use_threads  # noqa: E402

SCRIPT = "benchmarks/decisions.py"
GOAL = 1.3
"""Time of all questions, relative to the prefix alone."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES, metavar="SHAPE")
    parser.add_argument("--layers", type=int, metavar="N", help="of the shape (default: all)")
    parser.add_argument("--weights", nargs="+", default=["bfloat16"], metavar="KIND")
    parser.add_argument("--prefix", type=int, default=2000, metavar="N", help="tokens of the state (default: 2000)")
    parser.add_argument("--questions", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--own", type=int, nargs="+", default=[4, 8, 24], metavar="N", help="tokens of each question")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each kind (default: 3)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    use_threads(options.threads)
    lines, report = [], {}
    for weights in options.weights:
        quantization = None if weights == "bfloat16" else weights
        subject = measure.load(
            options.shape, num_threads=options.threads, quantization=quantization, layers=options.layers
        )
        driver = EngineDriver(subject.engine)
        for own in options.own:
            found = times(driver, subject.model.vocab_size, own, options)
            alone, together, apart = (statistics.median(seconds) for seconds in found)
            ratio = statistics.median(all_ / one for one, all_ in zip(found[0], found[1]))
            cells = [f"{alone:.2f}", f"{together:.2f}", f"{ratio:.2f}", f"{GOAL:.2f}", f"{apart:.2f}"]
            lines.append(" | ".join([f"| {weights}", str(own), _C.isa(), *cells]) + " |")
            report[f"{weights}, {own} tokens"] = round(ratio, 4)
            print(lines[-1], file=sys.stderr, flush=True)
        driver.close()
    text = [
        f"`{page.command(SCRIPT)}`: {options.shape}, {options.questions} questions, prefix of {options.prefix} tokens, "
        f"{_C.get_num_threads()} threads.\n",
        "| weights | tokens of a question | instructions | prefix s | all questions s | ratio | goal | one alone s |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
        *lines,
    ]
    page.publish(options.into, SCRIPT, "\n".join(text) + "\n\n", report)
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
