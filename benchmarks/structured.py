"""Measures the cost of grammars: sequences of a JSON schema compared with free ones of the same length, in turn.

    python benchmarks/structured.py [--shape qwen2.5-0.5b] [--threads 1] [--into benchmarks/RESULTS.md]

Weights are random, and the tokenizer is a byte-level BPE of the shape's vocabulary, trained on Python's library.
`records` is a list of small objects, with most tokens forced by the grammar. `skeleton` is a list of objects with a
single text, with about half of the tokens forced. `strings` is a list of strings with almost no forced tokens, which
shows the cost of the masks on their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.structured_schemas import SCHEMAS  # noqa: E402
from pace.bench.measure import load  # noqa: E402
from pace.llm import Grammar, SamplingConfig  # noqa: E402
from pace.llm.constraints.mask_filler import Job, MaskFiller, PendingMasks  # noqa: E402
from pace.llm.generator import Generator  # noqa: E402

SCRIPT = "benchmarks/structured.py"


@dataclass
class Run:
    """Result of one batch."""

    seconds: float
    num_tokens: int
    num_forced: int
    fill_seconds: float
    """Seconds spent on masks, over all threads."""
    wait_seconds: float
    """Seconds for which the engine waited for masks, or filled them itself."""

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def train_tokenizer(vocab_size: int) -> Any:
    """Trains a byte-level BPE of about `vocab_size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in library.rglob("*.py") if file.is_file())[:6000]
    tokenizer.train_from_iterator((file.read_text(encoding="utf-8", errors="replace") for file in files), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Yields the seconds spent on masks, and for which the engine waited for them."""
    seconds = {"fill": 0.0, "wait": 0.0}

    def timed(function: Any, part: str) -> Any:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds[part] += time.perf_counter() - begin

        return call

    places = {(Job, "run"): "fill", (MaskFiller, "prepare"): "wait", (PendingMasks, "wait"): "wait"}
    with ExitStack() as stack:
        for (owner, name), part in places.items():
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield seconds


def run(generator: Generator, batch: int, num_tokens: int, schema: dict[str, Any] | None) -> Run:
    config = SamplingConfig(
        max_new_tokens=num_tokens, ignore_eos=True, do_sample=True, top_k=0, seed=1, temperature=1.0
    )
    if schema is not None:
        config.grammar = Grammar.json_schema(schema, whitespace="compact")  # forces most tokens
    prompts = [[100 + 31 * row + column for column in range(16)] for row in range(batch)]
    with watched() as seconds:
        begin = time.perf_counter()
        out = generator.generate(prompts, config)
        taken = time.perf_counter() - begin
    assert all(len(row) == num_tokens for row in out.generated_token_ids), "every sequence has the same length"
    metrics = out.metrics
    return Run(taken, metrics.num_generated_tokens, metrics.num_forced_tokens, seconds["fill"], seconds["wait"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="default: qwen2.5-0.5b")
    parser.add_argument("--quantization", default="int4", help="default: int4")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], metavar="N", help="default: 1 64")
    parser.add_argument("--threads", type=int, metavar="N", help="of the model (default: what `pace env` says)")
    parser.add_argument("--generate", type=int, default=64, metavar="N", help="tokens a sequence (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are over so many (default: 3)")
    page.add_into_argument(parser)
    options = parser.parse_args()
    table = SCRIPT if options.threads is None else f"{SCRIPT} --threads {options.threads}"
    page.check_page(options.into, table)

    subject = load(options.shape, num_threads=options.threads, quantization=options.quantization)
    vocab_size = subject.engine.model.vocab_size
    tokenizer = train_tokenizer(vocab_size)
    generator = Generator(subject.engine, tokenizer)
    begin = time.perf_counter()
    generator.constraints.grammars.compile(Grammar.regex("a"))
    table_seconds = time.perf_counter() - begin

    runs: dict[tuple[int, str], list[Run]] = {}
    for number in range(options.rounds + 1):
        for batch in options.batches:
            for name, schema in [("free", None), *SCHEMAS.items()]:
                done = run(generator, batch, options.generate, schema)
                if number:  # the first round warms up
                    runs.setdefault((batch, name), []).append(done)
    firsts = first_tokens(generator)
    page.publish(options.into, table, report(options, runs, firsts, len(tokenizer), table_seconds))
    return 0


def first_tokens(generator: Generator) -> dict[str, float]:
    """Median seconds to the first token of a prompt, without and with a compiled grammar, in turn."""
    taken: dict[str, list[float]] = {"free": [], "records": []}
    for _ in range(9):
        for name, seconds in taken.items():
            seconds.append(run(generator, 1, 1, SCHEMAS.get(name)).seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def report(
    options: argparse.Namespace,
    runs: dict[tuple[int, str], list[Run]],
    firsts: dict[str, float],
    num_tokens: int,
    table_seconds: float,
) -> str:
    lines = [
        f"`{page.command(SCRIPT)}`: {options.shape}, {options.quantization}, a tokenizer of {num_tokens:,} tokens, "
        f"{options.generate} tokens a sequence, {options.rounds} rounds. Table of the vocabulary: "
        f"{table_seconds:.1f} s. "
        f"First token: free {1e3 * firsts['free']:.1f} ms, with a grammar {1e3 * firsts['records']:.1f} ms.\n",
        "| sequences | text | tokens/s | of free | forced | masks took, ms a token | waited for them |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (batch, name), done in runs.items():
        rate = statistics.median(each.rate for each in done)
        ratio = statistics.median(each.rate / free.rate for each, free in zip(done, runs[batch, "free"]))
        forced = statistics.median(each.num_forced / each.num_tokens for each in done)
        fill, wait = (
            1e3 * statistics.median(getattr(each, field) / each.num_tokens for each in done)
            for field in ("fill_seconds", "wait_seconds")
        )
        lines.append(f"| {batch} | {name} | {rate:,.1f} | {ratio:.2f} | {forced:.2f} | {fill:.3f} | {wait:.3f} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
