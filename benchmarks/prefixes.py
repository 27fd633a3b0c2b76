"""Measures the seconds to the first token of a second question about a long document. They are compared with those of
the question alone. The same is measured after a restart, from a saved session.

    python benchmarks/prefixes.py [--into benchmarks/RESULTS.md] [--shape qwen3.5-0.8b gemma-3-1b llama-3.2-1b]

Shapes have random weights, and documents and questions random tokens. Each document is new: `first` is the first
question about it, document included, and `second` another one. Two lower bounds: `alone` is a question as a prompt of
its own, `appended` one that a session reads after the document. `reused` counts the tokens that the second question
took from the cache. Then a session saves the document. A new process loads it, and reads another question: `restored`
is both together, and `loading` its first part. The first load of a process also reads all weights once, to compare
their digest; that is not counted. Numbers are medians over the documents, ratios over the pairs of a document. A run
of only some shapes or questions leaves the other rows of a page unchanged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import page  # noqa: E402
from benchmarks.comparison.checkpoint import ensure_checkpoint  # noqa: E402
from pace import _C  # noqa: E402
from pace.llm import LLMModel  # noqa: E402

SCRIPT = "benchmarks/prefixes.py"
HEADER = ["shape", "weights", "instructions", "question", "first s", "second s", "reused", "alone s", "appended s"]
HEADER += ["second / alone", "second / appended", "loading s", "restored s", "restored / alone"]
KEYS = 4
"""Number of columns that identify a row."""
WARM_UP = 256
"""Tokens of the prompt that warms up."""


@dataclass(frozen=True)
class Case:
    """What one process asks."""

    checkpoint: Path
    sessions: Path
    """Directory of the saved documents."""
    document: int
    """Tokens of a document."""
    question: int
    """Tokens of a question."""
    documents: int
    options: dict[str, Any]
    """Arguments of LLMModel."""

    def open(self) -> LLMModel:
        """Loads the model, and warms up."""
        model = LLMModel(self.checkpoint, progress=False, **self.options)
        first_token(model, self.tokens(model, WARM_UP, 0))
        return model

    def tokens(self, model: LLMModel, count: int, *seed: int) -> list[int]:
        """Returns random tokens; the same for the same numbers `seed`."""
        generator = torch.Generator().manual_seed(sum(1000**place * number for place, number in enumerate(seed)))
        return torch.randint(model.config.vocab_size, (count,), generator=generator).tolist()

    def saved(self, number: int) -> Path:
        return self.sessions / f"{number}.session"


@dataclass(frozen=True)
class Asked:
    """Seconds to the first token of questions about one document."""

    first: float
    second: float
    reused: int
    alone: float
    appended: float


@dataclass(frozen=True)
class Restored:
    """Seconds after a restart."""

    loading: float
    appended: float


def ask(case: Case) -> list[Asked]:
    """Asks about each document, and saves it."""
    found = []
    with case.open() as model:
        with model.session() as session:
            session.append(case.tokens(model, WARM_UP, 0))
            session.save(case.saved(0))
        for number in range(1, case.documents + 1):
            document = case.tokens(model, case.document, number)
            questions = [case.tokens(model, case.question, number, 1 + index) for index in range(4)]
            alone, _ = first_token(model, questions[0])
            first, _ = first_token(model, document + questions[1])
            second, reused = first_token(model, document + questions[2])
            with model.session() as session:
                session.append(document)
                session.save(case.saved(number))
                appended = seconds(lambda: session.append(questions[3]))
            found.append(Asked(first, second, reused, alone, appended))
    return found


def restore(case: Case) -> list[Restored]:
    """Loads each saved document, and asks."""
    found = []
    with case.open() as model:
        model.load_session(case.saved(0)).close()
        for number in range(1, case.documents + 1):
            began = time.perf_counter()
            with model.load_session(case.saved(number)) as session:
                loading = time.perf_counter() - began
                question = case.tokens(model, case.question, number, 9)
                found.append(Restored(loading, seconds(lambda: session.append(question))))
    return found


def first_token(model: LLMModel, prompt: list[int]) -> tuple[float, int]:
    """Returns the seconds to a prompt's first token, and the number of its tokens that were in the cache."""
    began = time.perf_counter()
    output = model.generate(prompt, max_new_tokens=1, do_sample=False)
    return time.perf_counter() - began, output.metrics.num_reused_tokens


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def in_new_process(function: Callable[[Case], list], case: Case) -> list:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, case).result()


def row(case: Case, keys: list[str]) -> str:
    asked, restored = in_new_process(ask, case), in_new_process(restore, case)

    def median(values) -> float:
        return statistics.median(values)

    cells = [
        f"{median(one.first for one in asked):.2f}",
        f"{median(one.second for one in asked):.3f}",
        f"{median(one.reused for one in asked):,.0f}",
        f"{median(one.alone for one in asked):.3f}",
        f"{median(one.appended for one in asked):.3f}",
        f"{median(one.second / one.alone for one in asked):.2f}",
        f"{median(one.second / one.appended for one in asked):.2f}",
        f"{median(one.loading for one in restored):.3f}",
        f"{median(one.loading + one.appended for one in restored):.3f}",
        f"{median((one.loading + one.appended) / before.alone for one, before in zip(restored, asked)):.2f}",
    ]
    return " | ".join([f"| {keys[0]}", *keys[1:], *cells]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", nargs="+", default=["qwen3.5-0.8b", "gemma-3-1b", "llama-3.2-1b"], metavar="SHAPE",
        help="as of compare.py (default: qwen3.5-0.8b gemma-3-1b llama-3.2-1b)",
    )  # fmt: skip
    parser.add_argument("--weights", nargs="+", default=["bfloat16"], metavar="KIND", help="bfloat16, int8, ...")
    parser.add_argument("--document", type=int, default=8000, metavar="N", help="tokens (default: 8000)")
    parser.add_argument(
        "--question", type=int, nargs="+", default=[32, 100], metavar="N", help="tokens (default: 32 100)"
    )
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="of each row (default: 3)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    parser.add_argument("--kv-cache-bytes", default="4GiB", metavar="SIZE", help="default: 4GiB")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compare", help="where shapes are kept")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    rows = page.earlier_rows(options.into, SCRIPT, KEYS)
    for shape in options.shape:
        checkpoint = ensure_checkpoint(shape, options.folder / shape)
        for weights in options.weights:
            of_model = {"num_threads": options.threads, "kv_cache_bytes": options.kv_cache_bytes}
            of_model |= {"quantization": None if weights == "bfloat16" else weights, "weights_cache": False}
            for question in options.question:
                keys = [shape, weights, _C.isa(), str(question)]
                with tempfile.TemporaryDirectory() as sessions:
                    case = Case(checkpoint, Path(sessions), options.document, question, options.documents, of_model)
                    rows[tuple(keys)] = row(case, keys)
                print(rows[tuple(keys)], file=sys.stderr, flush=True)
    text = [
        f"`{page.command(SCRIPT)}`: documents of {options.document:,} tokens; rows that this command does not name are "
        "of an earlier one.\n",
        "| " + " | ".join(HEADER) + " |",
        "|---|---|---|" + "---:|" * (len(HEADER) - KEYS + 1),
        *rows.values(),
    ]
    page.publish(options.into, SCRIPT, "\n".join(text) + "\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
