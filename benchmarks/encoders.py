"""Measures embedding models: texts a second at several lengths, and the latency of one query, next to
sentence-transformers, ONNX Runtime and llama.cpp.

    python benchmarks/encoders.py --shapes all-minilm-l6-v2              # pace alone, some minutes.
    python benchmarks/encoders.py --peer-python PATH --llama-python PATH --llama-source PATH

All runtimes load the same random weights. Each is a process that keeps its model, and they take turns; each run has
other texts of random words. A rate is the median of `--rounds` runs, and a ratio the median over the pairs of runs. In
"mixed", texts have 8 to 512 tokens, and the logarithm of their number is uniform. Where a runtime has several kinds of
weights or sizes of batches, the fastest counts. MFU is the share of the machine's fp32 multiply-add peak, for
the products of layers and attention, without padding. Products in bf16 and int8 may exceed it.

Peers: `pip install torch sentence-transformers onnxruntime onnx onnxscript` and `pip install llama-cpp-python`, each in
any environment, and the unpacked source archive of llama-cpp-python of the same version, whose converter writes the
GGUF files. A run replaces its own rows of the page and keeps the others. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.comparison.worker import Worker, WorkerError  # noqa: E402
from benchmarks.encoder_costs.checkpoint import (  # noqa: E402
    SHAPES,
    ensure_checkpoint,
    ensure_gguf,
    flops,
    is_causal,
    lengths_of,
    random_texts,
)
from pace import _C  # noqa: E402

SCRIPT = "benchmarks/encoders.py"
MODULE = "benchmarks.encoder_costs.worker"
PACE, SENTENCE, ONNX, LLAMA = "pace", "sentence-transformers", "onnxruntime", "llama.cpp"
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "fp32": {PACE: ("fp32",), SENTENCE: ("float32",), ONNX: ("fp32",), LLAMA: ("f32",)},
    "bf16": {PACE: ("bf16",), SENTENCE: ("bfloat16",), LLAMA: ("bf16", "f16")},
    "int8": {PACE: ("int8",), ONNX: ("int8",), LLAMA: ("q8_0",)},
}
"""Weights -> runtime -> its kinds of weights. sentence-transformers has int8 only through ONNX Runtime."""
QUERY_TOKENS = 16
QUERIES_PER_TURN = 10

Seconds = dict[tuple[str, str], list[float]]
"""(runtime, its kind of weights) -> the seconds of its turns."""


@dataclass(frozen=True)
class Contender:
    """A loaded model of a runtime."""

    runtime: str
    variant: str
    worker: Worker

    @property
    def key(self) -> tuple[str, str]:
        return self.runtime, self.variant


class Contest:
    """The contenders of one shape and kind of weights. One that fails is left out from then on, with a message."""

    def __init__(self, stack: ExitStack, shape: str, weights: str, options: argparse.Namespace) -> None:
        self.contenders: list[Contender] = []
        self.shape, self.weights = SHAPES[shape], weights
        checkpoint = ensure_checkpoint(shape, options.folder)
        pythons = {PACE: sys.executable, SENTENCE: options.peer_python, ONNX: options.peer_python}
        pythons |= {LLAMA: options.llama_python}
        for runtime, variants in VARIANTS[weights].items():
            for variant in variants if pythons[runtime] else ():
                arguments = {"checkpoint": str(checkpoint), "variant": variant, "threads": options.threads}
                arguments["pooling"] = self.shape.pooling
                try:
                    if runtime == LLAMA:
                        arguments["gguf"] = str(ensure_gguf(checkpoint, source_of(options.llama_source), variant))
                    worker = stack.enter_context(Worker(runtime, pythons[runtime], log=options.log, module=MODULE))
                    worker.ask("load", **arguments)
                    self.contenders.append(Contender(runtime, variant, worker))
                except (WorkerError, subprocess.CalledProcessError) as error:
                    if runtime == PACE:
                        raise
                    print(f"{runtime} {variant}, {shape}: {error}", file=sys.stderr, flush=True)

    def ask(self, operation: str, turn: int = 0, **arguments: Any) -> dict[tuple[str, str], dict[str, Any]]:
        """The answers of all contenders. `turn` says who begins."""
        answers, first = {}, turn % len(self.contenders)
        for contender in [*self.contenders[first:], *self.contenders[:first]]:
            try:
                answers[contender.key] = contender.worker.ask(operation, **arguments)
            except WorkerError as error:
                if contender.runtime == PACE:
                    raise
                print(f"{contender.runtime} {contender.variant}: {error}", file=sys.stderr, flush=True)
                self.contenders.remove(contender)
        return answers

    def peak(self) -> float:
        return self.contenders[0].worker.ask("peak")["flops"]

    def take_turns(self, operation: str, lengths: list[int], rounds: int) -> Seconds:
        """The seconds of `rounds` turns of each contender that finished all, after a warm-up."""
        texts = lambda seed: words_of(self.shape.config, lengths, seed)
        self.ask("tune", ids=texts(0))
        found: Seconds = {contender.key: [] for contender in self.contenders}
        for turn in range(rounds):
            for key, answer in self.ask(operation, turn, ids=texts(1 + turn)).items():
                found[key].append(answer["seconds"])
        return {key: seconds for key, seconds in found.items() if len(seconds) == rounds}

    def least_cosine(self) -> float:
        """The least cosine of a peer's vector with that of pace."""
        ids = words_of(self.shape.config, [8, 32, 16, 100], 0)
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for index, contender in enumerate(list(self.contenders)):
                path = f"{folder}/{index}.npy"
                contender.worker.ask("vectors", ids=ids, path=path)
                found[contender.key] = np.load(path).astype(np.float64)
        cosines = {key: float((rows * found[PACE, self.weights]).sum(1).min()) for key, rows in found.items()}
        print({" ".join(key): round(cosine, 5) for key, cosine in cosines.items()}, file=sys.stderr, flush=True)
        return min(cosines.values())


def source_of(path: Path) -> Path:
    """llama.cpp's source: the path itself, or the part of llama-cpp-python's archive."""
    inner = path / "vendor" / "llama.cpp"
    return inner if inner.is_dir() else path


def words_of(config: dict[str, Any], lengths: list[int], seed: int) -> list[list[int]]:
    """Texts that have these lengths, with the special tokens of an encoder."""
    special = 0 if is_causal(config) else 2
    return random_texts(config["vocab_size"], [length - special for length in lengths], seed)


def summary(found: Seconds, weights: str) -> dict[str, Any]:
    """The median seconds of pace and of each peer, of its fastest kind of weights, and the median ratios to pace."""
    ours = found[PACE, weights]
    row: dict[str, Any] = {"seconds": statistics.median(ours), "peers": {}}
    for (runtime, variant), theirs in sorted(found.items(), key=lambda item: -statistics.median(item[1])):
        if runtime != PACE:  # the fastest is the last
            ratio = statistics.median(their / our for their, our in zip(theirs, ours))
            row["peers"][runtime] = {"variant": variant, "seconds": statistics.median(theirs), "ratio": ratio}
    return row


def throughput(contest: Contest, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = contest.shape.config
    for kind in options.lengths:
        lengths = lengths_of(kind, options.tokens or contest.shape.num_tokens)
        before = contest.peak()
        row = summary(contest.take_turns("run", lengths, options.rounds), contest.weights)
        peak = (before + contest.peak()) / 2
        operations = sum(flops(config, length) for length in lengths)
        row |= {"length": kind, "texts": len(lengths), "mfu": operations / row["seconds"] / peak}
        yield row


def latency(contest: Contest, options: argparse.Namespace) -> dict[str, Any]:
    row = summary(contest.take_turns("each", [QUERY_TOKENS] * QUERIES_PER_TURN, options.rounds), contest.weights)
    return row | {"least_cosine": contest.least_cosine()}


def cells(row: dict[str, Any], show: Callable[[float], str]) -> list[str]:
    """pace's own cell, and one of each peer with the ratio to pace."""
    found = [show(row["seconds"])]
    for runtime in (SENTENCE, ONNX, LLAMA):
        peer = row["peers"].get(runtime)
        found.append(f"{show(peer['seconds'])} (**{peer['ratio']:.2f}**)" if peer else "-")
    return found


def line(*parts: str) -> str:
    return f"| {' | '.join(parts)} |"


def throughput_line(row: dict[str, Any]) -> str:
    rate = lambda seconds: f"{row['texts'] / seconds:,.1f}"
    ours, *peers = cells(row, rate)
    return line(row["shape"], row["weights"], row["length"], ours, f"{row['mfu']:.0%}", *peers)


def latency_line(row: dict[str, Any]) -> str:
    return line(row["shape"], row["weights"], *cells(row, lambda s: f"{s * 1e3:,.2f} ms"), f"{row['least_cosine']:.4f}")


PEERS = [f"{runtime} (ratio)" for runtime in (SENTENCE, ONNX, LLAMA)]
HEADS = (
    [line("model", "weights", "tokens", "pace, texts/s", "MFU", *PEERS), "|---|---|---|" + "---:|" * 5],
    [line("model", "weights", f"pace, {QUERY_TOKENS} tokens", *PEERS, "least cosine"), "|---|---|" + "---:|" * 5],
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    published = [name for name in SHAPES if not name.startswith("tiny")]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=published, metavar="SHAPE")
    parser.add_argument("--weights", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--lengths", nargs="+", default=["16", "128", "512", "mixed"], metavar="N|mixed")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a run (default: depends on the shape)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each runtime (default: 3)")
    parser.add_argument("--threads", type=int, default=_C.cpu_info()["default_threads"], metavar="N")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "encoders", help="where models are kept")
    parser.add_argument("--peer-python", metavar="PATH", help="a python that has sentence_transformers and onnxruntime")
    parser.add_argument("--llama-python", metavar="PATH", help="a python that has llama_cpp")
    parser.add_argument(
        "--llama-source", type=Path, metavar="PATH", help="llama.cpp, or the archive of llama-cpp-python"
    )
    parser.add_argument("--log", type=Path, metavar="PATH", help="where the processes write what they log")
    page.add_into_argument(parser)
    options = parser.parse_args()
    if bool(options.llama_python) != bool(options.llama_source):
        parser.error("--llama-python and --llama-source need each other")
    wrong = [kind for kind in options.lengths if kind != "mixed" and not (kind.isdigit() and 3 <= int(kind) <= 512)]
    if wrong:
        parser.error(f"--lengths are numbers of tokens from 3 to 512, or mixed; got {', '.join(wrong)}")
    return options


def table(head: list[str], num_keys: int, rows: list[str], path: Path | None) -> str:
    """A table of these rows, and of those of an earlier run whose first `num_keys` cells are others."""
    found = page.earlier_rows(path, SCRIPT, num_keys, head[0])
    found |= {tuple(cell.strip() for cell in row.split("|")[1 : 1 + num_keys]): row for row in rows}
    return "\n".join([*head, *found.values()])


def main() -> int:
    options = parse()
    page.check_page(options.into, SCRIPT)
    rates, latencies = [], []
    try:
        for shape in options.shapes:
            for weights in options.weights:
                with ExitStack() as stack:
                    contest, name = Contest(stack, shape, weights, options), {"shape": shape, "weights": weights}
                    for row in throughput(contest, options):
                        rates.append(name | row)
                        print(throughput_line(rates[-1]), file=sys.stderr, flush=True)
                    latencies.append(name | latency(contest, options))
                    print(latency_line(latencies[-1]), file=sys.stderr, flush=True)
    finally:  # an interrupted run keeps what it has measured
        head = f"`{page.command(SCRIPT)}`: texts a second, on `{_C.isa()}`, {options.threads} threads. "
        head += "Rows that this command does not name are of an earlier one."
        found = [list(map(throughput_line, rates)), list(map(latency_line, latencies))]
        tables = [table(lines, keys, rows, options.into) for lines, keys, rows in zip(HEADS, (3, 2), found)]
        text = "\n\n".join([head, *tables])
        page.publish(options.into, SCRIPT, text + "\n\n", {"throughput": rates, "latency": latencies})
    return 0


if __name__ == "__main__":
    sys.exit(main())
