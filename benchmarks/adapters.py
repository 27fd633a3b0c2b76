"""Measures what LoRA adapters cost: decode and prefill with adapters, next to the base model alone.

    python benchmarks/adapters.py [--into benchmarks/RESULTS.md] [--shape llama-3.2-1b] [--weights bfloat16 int8 int4]

The model has random weights, and adapters of all its linear layers. Runs with and without adapters take turns; a ratio
is the median over the pairs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import random_weights  # noqa: E402
from benchmarks.random_weights import Row  # noqa: E402
from pace.bench.result import Subject  # noqa: E402
from pace.llm.adapters.modules import HEAD, places_of  # noqa: E402
from pace.llm.adapters.slots import AdapterSlots  # noqa: E402
from pace.llm.adapters.weights import AdapterModule, AdapterWeights  # noqa: E402
from pace.llm.sampling.sampler import Sampling  # noqa: E402
from pace.llm.sequence import AdapterKey, Sequence  # noqa: E402
from pace.llm.text.stopping_criteria import StoppingCriteria  # noqa: E402

SCRIPT = "benchmarks/adapters.py"
LOADED = 32
"""Adapters in slots, used or not."""
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A step that is timed, and the least share of the base's rate that it should reach."""

    name: str
    batch: int
    adapters: int
    goal: float
    is_prefill: bool = False


CASES = [
    Case("decode 1, 1 adapter", 1, 1, 0.95),
    Case("decode 8, 8 adapters", 8, 8, 0.85),
    Case("decode 32, 8 adapters", 32, 8, 0.85),
    Case("decode 32, none of 32 adapters", 32, 0, 1.0),
    Case("prefill, 1 adapter", 1, 1, 0.96, True),
    Case("prefill, none of 32 adapters", 1, 0, 1.0, True),
]


def main() -> int:
    parser = random_weights.make_parser(__doc__, "llama-3.2-1b")
    parser.add_argument("--rank", type=int, default=16, metavar="N", help="of each adapter (default: 16)")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of a prefill (default: 512)")
    parser.add_argument("--generate", type=int, default=24, metavar="N", help="decode steps (default: 24)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs (default: 5)")
    parser.add_argument("--profile", action="store_true", help="print the seconds of each kind of instruction")
    options = parser.parse_args()

    def rows_of(subject: Subject) -> Iterator[Row]:
        keys = load_adapters(subject, options.rank)
        for case in CASES:
            base, adapted = rates(subject, case, keys, options)
            ratio = statistics.median(ours / theirs for ours, theirs in zip(adapted, base))
            cells = [f"{statistics.median(base):,.1f}", f"{statistics.median(adapted):,.1f}", f"{ratio:.3f}"]
            yield Row(case.name, [*cells, f"{case.goal:.2f}"], ratio)

    columns = ["step", "base t/s", "with adapters t/s", "ratio", "goal"]
    random_weights.measure_rows(SCRIPT, options, f"rank {options.rank}", columns, rows_of)
    return 0


def load_adapters(subject: Subject, rank: int) -> list[AdapterKey]:
    """Loads adapters of all products but the head, and returns their keys."""
    engine, model, generator = subject.engine, subject.model, torch.Generator().manual_seed(0)
    slots = engine.model.adapters = AdapterSlots(model, LOADED, rank)
    sizes = {
        tensor: (sum(len(place.product.parts[place.part].rows) for place in places), places[0].product.layer.k)
        for tensor, places in places_of(model).items()
        if tensor != HEAD
    }
    keys: list[AdapterKey] = []
    for number in range(LOADED):
        modules = {
            tensor.removesuffix(".weight"): AdapterModule(
                torch.randn(rank, k, generator=generator) / k**0.5,
                torch.randn(n, rank, generator=generator) / rank,
                None,
                2.0,
            )
            for tensor, (n, k) in sizes.items()
        }
        keys.append(((slots.load(AdapterWeights(str(number), modules)), 1.0),))
    return keys


def rates(
    subject: Subject, case: Case, keys: list[AdapterKey], options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Tokens per second of the base and with adapters, in pairs of neighbouring runs."""
    run = prefill if case.is_prefill else decode
    adapters = [keys[row % case.adapters] if case.adapters else () for row in range(case.batch)]
    base = [()] * case.batch
    run(subject, adapters, options)  # a warm-up, which also records the program
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.repeats):
        for is_adapted in (False, True) if number % 2 else (True, False):
            found[is_adapted].append(run(subject, adapters if is_adapted else base, options))
    if options.profile and case.adapters:
        profile(subject, lambda: run(subject, adapters, options))
    return found[False], found[True]


def sequences_of(subject: Subject, adapters: list[AdapterKey], prompt: int, generated: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(subject.model.vocab_size, (len(adapters), prompt), generator=generator).tolist()
    length = prompt + generated
    found = [Sequence(row, Sampling(), StoppingCriteria(length, []), length) for row in ids]
    for sequence, adapter in zip(found, adapters):
        sequence.adapter = adapter
    return found


def prefill(subject: Subject, adapters: list[AdapterKey], options: argparse.Namespace) -> float:
    engine, sequences = subject.engine, sequences_of(subject, adapters, options.prompt, 1)
    started = time.perf_counter()
    engine.submit(sequences)
    while engine.step():
        pass
    return options.prompt / (time.perf_counter() - started)


def decode(subject: Subject, adapters: list[AdapterKey], options: argparse.Namespace) -> float:
    engine, sequences = subject.engine, sequences_of(subject, adapters, 16, options.generate + WARM_UP + 1)
    engine.submit(sequences)
    while not all(sequence.num_generated for sequence in sequences):
        engine.step()
    seconds = []
    while not any(sequence.is_finished for sequence in sequences):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    while engine.step():
        pass
    return len(sequences) / statistics.median(seconds[WARM_UP:-1])


def profile(subject: Subject, run) -> None:
    """Prints the seconds of each kind of instruction."""
    runner = subject.engine.model
    runner.set_profiling(True)
    run()
    totals: dict[str, float] = {}
    for _, name, seconds in runner.timings():
        totals[name] = totals.get(name, 0.0) + seconds
    runner.set_profiling(False)
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        print(f"  {seconds:8.4f} s  {name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
