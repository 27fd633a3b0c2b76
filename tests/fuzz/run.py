"""Loads mutated checkpoints in child processes. Each must give a documented error or generate tokens.

    python -m tests.fuzz.run --cases 2000 [--first 0] [--quarter 0] [--verbose]

A case fails in one of these ways:

- The process dies or hangs, or its memory grows by more than `MAX_GROWTH_BYTES`.
- The error has no documented type, or does not name the wrong file or field.
- A loaded model holds data that did not come from the checkpoint.
- Code of the checkpoint ran.

The last line is one JSON object; the exit code is 1 if any case failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP threads do not survive fork

import torch

from pace.checkpoints.gguf.blocks import BLOCK_TYPES
from pace.llm import EmbeddingModel, LLMModel, SamplingConfig
from pace.llm.encoding.embedder import TextTokens
from pace.llm.layers import Linear
from pace.llm.layers.base import Vectors
from pace.llm.loading.checkpoint import Checkpoint, read_config_json
from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.load import load_model
from pace.llm.loading.model import fill_model, make_encoder
from pace.llm.loading.options import LoadOptions
from pace.llm.models.encoders.encoder_list import find_encoder
from pace.llm.models.model import Model
from pace.memory import resident_bytes
from pace.ops import native
from pace.ops.blocks import BlockRows
from pace.ops.weight_layout import CODES, GRIDS, SUPER_BLOCK, QuantizedRows, WeightLayout, parts_of
from tests.fuzz.checkpoints import healthy_checkpoints, write
from tests.fuzz.mutate import make_case

DOCUMENTED = (ValueError, TypeError, FileNotFoundError, NotImplementedError, PermissionError)
CASE_SECONDS = 100
# The tiny checkpoints need about 1 MB. Parsing the largest allowed config or tokenizer may take some 100 MB.
MAX_GROWTH_BYTES = 300 << 20
# The engine reserves address space for its cache, up to half of the machine's memory. Beyond twice all memory, an
# allocation fails instead of taking the machine down.
ADDRESS_SPACE_BYTES = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
NAMES_A_CAUSE = (
    "config.json", "checkpoint", "tokenizer", ".safetensors", ".bin", ".gguf", ".json", "tensor", "case-",
    "architecture", "eos_token_id", "max_position_embeddings", "the weights",
)  # fmt: skip


def run_case(seed: int, checkpoints: dict, folder: Path) -> tuple[str, str]:
    """The outcome ("loaded", the name of an error type, or "FAIL ...") and a description of the mutation."""
    files, description = make_case(seed, checkpoints)
    case = folder / f"case-{seed}"
    write(files, case)
    os.chdir(case)
    reset_peak()
    before = resident_bytes()
    try:
        outcome = generate(case)
    except DOCUMENTED as error:
        # Errors such as the tokenizers library's PanicException are not DOCUMENTED: they reach the last branch.
        outcome = type(error).__name__
        if not any(word in str(error) for word in NAMES_A_CAUSE):
            outcome = f"FAIL: the message of {outcome} names no file or field: {error}"
        description += f" -> {str(error)[:400]}"
    except BaseException:
        outcome = f"FAIL: {traceback.format_exc()}"
    growth = resident_bytes(peak=True) - before
    if growth > MAX_GROWTH_BYTES:
        outcome = f"FAIL: {growth >> 20} MB of memory ({outcome})"
    if (case / "hacked").exists():
        outcome = "FAIL: the checkpoint ran code"
    os.chdir(folder)
    shutil.rmtree(case)
    return outcome, description


def generate(case: Path) -> str:
    """Loads, and generates or embeds. The loaded weights must not depend on the earlier contents of their memory."""
    path = find_checkpoint(case)
    if find_encoder(read_config_json(path)) is None:
        generate_tokens(case)
        load = lambda: load_model(LoadOptions(case, dtype=torch.float32, num_threads=1, progress=False))
    else:
        embed_text(case)
        load = lambda: load_encoder(path)
    first, second = (poisoned_bits(load, poison) for poison in (0.0, 7.5))
    if first != second:
        return "FAIL: weights were left as they were before loading"
    return "loaded"


def generate_tokens(case: Path) -> None:
    with LLMModel(case, dtype=torch.float32, num_threads=1, progress=False) as model:
        inputs = [1, 2, 3] if model.tokenizer is None or len(model.tokenizer) > model.config.vocab_size else "hello"
        model.generate(inputs, SamplingConfig(max_new_tokens=2, do_sample=False))


def embed_text(case: Path) -> None:
    with EmbeddingModel(case, dtype=torch.float32, num_threads=1, progress=False) as model:
        texts = [TextTokens((1, 2, 3))]
        if model.tokenizer is not None and len(model.tokenizer) <= model.embedder.vocab_size:
            texts = model.tokenize("hello")
        model.embed_tokens(texts)
        if model.num_labels:
            model.logits_of(texts)


def load_encoder(path: Path) -> Model:
    checkpoint = Checkpoint(path)
    model = make_encoder(checkpoint, torch.float32, native, None)
    fill_model(model, checkpoint, 1, False)
    return model


def poisoned_bits(load: Callable[[], Model], poison: float) -> list[bytes]:
    """The bits of all weights, loaded into memory that was filled with `poison`."""
    allocate = Model.allocate

    def allocate_poisoned(model, ops, dtype):
        allocate(model, ops, dtype)
        for layer in model.walk():
            if isinstance(layer, Vectors) and layer.values is not None:
                layer.values.fill_(poison)
            elif isinstance(layer, Linear):
                poison_matrix(ops, layer.weight, poison)

    Model.allocate = allocate_poisoned
    try:
        model = load()
    finally:
        Model.allocate = allocate
    vectors = [layer.values for layer in model.walk() if isinstance(layer, Vectors) and layer.values is not None]
    matrices = [model.ops.unpack(layer.weight) for layer in model.walk() if isinstance(layer, Linear)]
    return [tensor.contiguous().numpy().tobytes() for tensor in vectors + matrices]


def poison_matrix(ops, weight, poison: float) -> None:
    """Fills a weight with `poison`; in a quantised weight, the scales and minima."""
    row = 0
    for rows, layout in parts_of(weight.layout, weight.n):
        shape = (rows, weight.k)
        if isinstance(layout, WeightLayout):
            ops.pack_quantized_(weight, poisoned_rows(layout, shape, weight.order, poison), row)
        else:
            ops.pack_rows_(weight, torch.full(shape, poison), row)
        row += rows


def poisoned_rows(layout: WeightLayout, shape: tuple[int, int], order, poison: float) -> QuantizedRows | BlockRows:
    if layout.code in GRIDS:
        kind = next(kind for kind in BLOCK_TYPES.values() if kind.layout == layout)
        return BlockRows(kind, torch.full((shape[0], kind.row_bytes(shape[1])), int(poison), dtype=torch.uint8))
    codes = torch.ones(shape, dtype=CODES[layout.code])
    groups, supers = torch.full((shape[0], layout.num_groups(shape[1])), poison), None
    if layout.in_super_blocks:
        groups = groups.to(torch.int8)
        supers = torch.full((shape[0], shape[1] // SUPER_BLOCK), poison, dtype=torch.float16)
    mins, super_mins = (groups, supers) if layout.has_mins else (None, None)
    return QuantizedRows(layout, codes, groups, mins, order, super_scales=supers, super_mins=super_mins)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# -------------------------------------------------------------------------------------------------------------
# processes


def run_cases(seeds: list[int], checkpoints: dict, folder: Path, verbose: bool = False) -> tuple[Counter, list[str]]:
    """Counts of the outcomes, and a text for each failure. A child runs case after case until it dies."""
    outcomes: Counter = Counter()
    failures = []
    todo = list(seeds)
    while todo:
        pid, pipe = start_child(todo, checkpoints, folder)
        with os.fdopen(pipe, "r") as results:
            while todo:
                ready, _, _ = select.select([results], [], [], CASE_SECONDS)
                line = results.readline() if ready else ""
                if not line:
                    break
                outcome, description = json.loads(line)
                if verbose:
                    print(todo[0], outcome.splitlines()[0], "|", description, flush=True)
                outcomes[outcome if not outcome.startswith("FAIL") else "failed"] += 1
                if outcome.startswith("FAIL"):
                    failures.append(f"seed {todo[0]}: {description}\n{outcome}")
                todo.pop(0)
            if todo:
                os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if todo:
            how = "hung" if not ready else f"died with status {status}"
            failures.append(f"seed {todo[0]}: {make_case(todo[0], checkpoints)[1]}\nthe process {how}")
            outcomes["failed"] += 1
            todo.pop(0)
    return outcomes, failures


def prepare(folder: Path, only: str = "", part: slice = slice(None)) -> dict:
    """The healthy checkpoints, a part of them, or those whose names begin with `only`, after a check that they load.
    That imports what they need before any child is forked."""
    torch.set_num_threads(1)
    checkpoints = healthy_checkpoints(folder, part)
    if importlib.util.find_spec("gguf"):  # it writes the files
        from tests.fuzz import gguf_cases

        checkpoints |= gguf_cases.healthy_checkpoints(folder, part)
    checkpoints = {name: files for name, files in checkpoints.items() if name.startswith(only)}
    for name, files in checkpoints.items():
        case = folder / name.replace("/", "-")
        write(files, case)
        outcome = generate(case)
        if outcome != "loaded":
            raise AssertionError(f"the healthy checkpoint {name} fails: {outcome}")
    return checkpoints


def start_child(seeds: list[int], checkpoints: dict, folder: Path) -> tuple[int, int]:
    """Forks a process that writes one line per case. Returns its process id, and the pipe to read from."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        os.close(read_end)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for seed in seeds:
            os.write(write_end, (json.dumps(run_case(seed, checkpoints, folder)) + "\n").encode())
    finally:
        os._exit(0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="only the checkpoints whose names begin so, such as gguf"
    )
    parser.add_argument(
        "--quarter", type=int, choices=range(4), metavar="0..3", help="only every fourth checkpoint, from this one on"
    )
    parser.add_argument("--verbose", action="store_true", help="print every case")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        part = slice(options.quarter, None, None if options.quarter is None else 4)
        checkpoints = prepare(Path(folder), options.only, part)
        seeds = list(range(options.first, options.first + options.cases))
        outcomes, failures = run_cases(seeds, checkpoints, Path(folder), options.verbose)
    for failure in failures:
        print(failure, file=sys.stderr)
    seconds = round(time.perf_counter() - started, 1)
    print(
        json.dumps(
            {"cases": options.cases, "first": options.first, "seconds": seconds, **dict(sorted(outcomes.items()))}
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
