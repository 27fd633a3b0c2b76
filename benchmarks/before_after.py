"""Runs `pace bench` on two source trees in turn, to find regressions of speed.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python benchmarks/before_after.py ../before [--into benchmarks/RESULTS.md]

Each tree runs in a separate process, which keeps its model. The processes take turns in the order A B B A, so that a
drift of the machine affects both. A figure is the median of the runs; a ratio is the median over the pairs of
neighbouring runs.

--best is for machines whose cores are sometimes used by others. A figure is then the best of the runs, and a ratio that
of the best. The speed of reading weights depends on where the system placed them, which differs by process; --loads
starts new processes. A run of only some models, weights or instruction sets leaves the other rows of a page unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from pace import _C  # noqa: E402
from pace.llm.loading.options import use_threads  # noqa: E402

SCRIPT = "benchmarks/before_after.py"
BUNDLED = "bundled"
AS_IT_IS = ("bf16", "file")
"""Formats that ask for no quantization: a shape in bf16, or what a file holds."""
MODELS = (BUNDLED, "qwen2.5-0.5b", "llama-3.2-1b")
FORMATS = ("bf16", "int8", "int4")
KEYS = 4
"""Number of columns that identify a row."""
LEAST = 0.98
"""A ratio below this makes the exit code 1."""

WORKER = """
import json, sys
from pathlib import Path
import pace
from pace.bench import measure
name, quantization, threads = json.loads(sys.argv[1])
model = str(Path(pace.__file__).parent / "assets" / "tiny") if name == "bundled" else name
subject = measure.load(model, num_threads=threads, quantization=quantization)
for line in sys.stdin:
    result = measure.measure(subject, *json.loads(line), 1)
    print(json.dumps([result.prefill_tokens_per_second, result.decode_tokens_per_second]), flush=True)
"""
"""Loads one model, then answers each line [prompt, generated, batch] with tokens per second of prefill and decode. It
uses the `pace` of its tree, so it must also run with the older one."""


@dataclass
class Case:
    """One row: tokens per second of both trees, pair by pair."""

    model: str
    format: str
    batch: int
    isa: str
    of_best: bool
    before: list[list[float]]
    """[prefill, decode] of each run."""
    after: list[list[float]]

    @property
    def key(self) -> tuple[str, ...]:
        """The cells that identify the row."""
        return Path(self.model).name, self.format, str(self.batch), self.isa

    def row(self) -> str:
        cells = []
        figure = max if self.of_best else statistics.median
        for phase in (0, 1):
            before, after = (figure(run[phase] for run in runs) for runs in (self.before, self.after))
            cells += [f"{before:,.1f}", f"{after:,.1f}", f"{self.ratio(phase):.3f}"]
        return " | ".join(["| " + self.key[0], *self.key[1:], *cells]) + " |"

    def ratio(self, phase: int) -> float:
        if self.of_best:
            return max(run[phase] for run in self.after) / max(run[phase] for run in self.before)
        return statistics.median(after[phase] / before[phase] for before, after in zip(self.before, self.after))


class Tree:
    """A model of one tree, in a separate process."""

    def __init__(self, folder: Path, model: str, format: str, threads: int | None) -> None:
        arguments = json.dumps([model, None if format in AS_IT_IS else format, threads])
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, prompt: int, generated: int, batch: int) -> list[float]:
        """Returns tokens per second of prefill and of decode."""
        self.process.stdin.write(json.dumps([prompt, generated, batch]) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the worker of {self.process.args[0]} ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()


def main() -> int:
    options = parse()
    page.check_page(options.into, SCRIPT)
    cases = []
    for model in options.models:
        for format in options.formats:
            new = [Case(model, format, batch, _C.isa(), options.best, [], []) for batch in options.batch]
            for _ in range(options.loads):
                trees = [Tree(folder, model, format, options.num_threads) for folder in (options.before, ROOT)]
                for case in new:
                    alternate(*trees, case, options)
                for tree in trees:
                    tree.close()
            for case in new:
                print(case.row(), file=sys.stderr, flush=True)
            cases += new
    page.publish(options.into, SCRIPT, table(cases, options, page.earlier_rows(options.into, SCRIPT, KEYS)))
    return int(any(case.ratio(phase) < LEAST for case in cases for phase in (0, 1)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other tree, built in place")
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help=f"shapes, files, or {BUNDLED}; default: {' '.join(MODELS)}"
    )
    parser.add_argument("--formats", nargs="+", default=FORMATS, help=f"or 'file'; default: {' '.join(FORMATS)}")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="N", help="default: 1 8")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens of a prompt (default: 128)")
    parser.add_argument("--generate", type=int, default=32, metavar="N", help="decode steps (default: 32)")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="pairs of runs of each row (default: 6)")
    parser.add_argument("--loads", type=int, default=1, metavar="N", help="do all of it with so many processes")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: what `pace env` says")
    parser.add_argument("--best", action="store_true", help="compare the best runs, and no medians")
    page.add_into_argument(parser)
    options = parser.parse_args()
    if min(options.rounds, options.loads) < 1:
        parser.error("--rounds and --loads must be at least 1")
    options.before = options.before.resolve()
    options.models = [str(Path(name).resolve()) if Path(name).is_file() else name for name in options.models]
    if not list(options.before.glob("pace/_C*.so")):
        parser.error(f"no extension in {options.before}: run `python setup.py build_ext --inplace` there")
    return options


def alternate(before: Tree, after: Tree, case: Case, options: argparse.Namespace) -> None:
    """Runs both processes in turn and adds the results to the case."""
    sizes = options.prompt, options.generate, case.batch
    for tree in (before, after):  # warm up: the model is already loaded
        tree.run(*sizes)
    for number in range(options.rounds):
        pair = [(before, case.before), (after, case.after)]
        for tree, runs in pair if number % 2 == 0 else reversed(pair):
            runs.append(tree.run(*sizes))


def table(cases: list[Case], options: argparse.Namespace, earlier: dict[tuple[str, ...], str]) -> str:
    lines = [
        f"`{page.command(SCRIPT)}` with {use_threads(options.num_threads)} threads: prompts of "
        f"{options.prompt} tokens, {options.generate} steps, {options.rounds * options.loads} pairs. Tokens a "
        f"second before, after, and "
        "their ratio; rows that this command does not name are of an earlier one.\n",
        "| model | weights | batch | instructions | prefill before | after | ratio | decode before | after | ratio |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
        *(earlier | {case.key: case.row() for case in cases}).values(),
    ]
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
