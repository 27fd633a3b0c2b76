"""Compares the cache strategies in time and memory, and the prefix cache on and off, as Markdown and a line of JSON.

    python benchmarks/cache.py --into benchmarks/RESULTS.md                      # about 10 minutes on two cores, 4 GB of memory
    python benchmarks/cache.py --shape llama-3.2-1b --context 4096 --generate 256 --batch 1

Policies: `--batch` sequences of `--context` positions each, with random keys and values, get `--generate` more tokens.
The strategies take turns repeatedly, each with a separate, fresh cache. Times are medians of the repeats over all
steps, including those in which a run of blocks moves. `copying` is the share of the time spent on copying blocks.
`held` is the maximum of blocks held at once, including spare rows and a second run during a copy. `resident` is the
memory of the pool that the system has allocated. Both are in units of the final size of the texts.

COPY_COST of pace/llm/cache/allocators.py is the time to copy a byte over the time in which decode attention reads one.
The line below the table shows the measured ratio. If it keeps disagreeing with the constant, change the constant.
Prefix cache: a prompt of `--context` tokens, then prompts that share all but their last 32 tokens with it; seconds to
their first token.

Tables are printed on stdout, or written into FILE between its two lines that name this script. The JSON line is the
last one of stdout; progress is printed on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import add_into_argument, check_page, command, publish
from pace import _C
from pace.bench import measure
from pace.bench.result import Subject
from pace.llm.cache.allocators import COPY_COST, balanced_rows
from pace.llm.cache.manager import CacheManager
from pace.llm.engine.engine import Engine
from pace.llm.sampling.sampler import Sampling
from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import StoppingCriteria
from pace.memory import available_memory_bytes, format_bytes

SCRIPT = "benchmarks/cache.py"
NEW_TOKENS = 32
"""Tokens of a prompt that do not belong to the known prefix."""


@dataclass(frozen=True)
class Run:
    """One run of a strategy."""

    seconds: float
    """Time of all decode steps."""
    copy_seconds: float
    copied_bytes: int
    held_bytes: int
    """Maximum bytes of the blocks held by sequences."""
    resident_bytes: int
    """Resident bytes of the cache at the end; pages are never freed."""


@dataclass(frozen=True)
class Row:
    """Medians over the runs of a strategy."""

    strategy: str
    tokens_per_s: float
    speed_of_paged: float
    """Median over the repeats of this strategy's speed over that of paged in the same repeat."""
    copying_share: float
    copied_mib: float
    held_of_text: float
    resident_of_text: float


@dataclass(frozen=True)
class Prefix:
    """Results of prompts that share a prefix with an earlier one."""

    tokens: int
    reused_tokens: int
    first_token_s: float


def strategies(rows: list[int]) -> dict[str, dict]:
    """Maps a name in the table to options of the cache."""
    return {
        "paged": {},
        "paged, prefix cache": {"prefix_cache_bytes": None},
        "bmc": {"kv_cache_type": "bmc"},
        **{f"bmc, r = {r}": {"kv_cache_type": "bmc", "bmc_rows": r} for r in rows},
        "dynamic": {"kv_cache_type": "dynamic"},
    }


def engine_for(subject: Subject, options: dict) -> Engine:
    """Returns an engine whose cache may take half of the available memory, so that a run of blocks has room to move."""
    return Engine.create(subject.engine.model, subject.engine.ops, available_memory_bytes() // 2, cache_options=options)


def sequences(subject: Subject, count: int, length: int, generated: int, seed: int = 0) -> list[Sequence]:
    ids = torch.randint(
        subject.model.vocab_size, (count, length), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return [Sequence(row, Sampling(), StoppingCriteria(length + generated, []), length + generated) for row in ids]


def finish(engine: Engine, running: list[Sequence], after_step: Callable[[], None] = lambda: None) -> None:
    engine.submit(running)
    try:
        while not all(sequence.is_finished for sequence in running):
            engine.step()
            after_step()
    finally:
        engine.abort(running)


def decode(subject: Subject, options: dict, context: int, generated: int, batch: int) -> Run:
    """Raises ValueError if memory cannot hold the texts twice."""
    engine = engine_for(subject, options)
    cache = engine.cache
    wanted = 2 * batch * cache.bytes_for(context + generated)
    if wanted > cache.budget_bytes:
        raise ValueError(
            f"{batch} x {context + generated} tokens, and room to move, need a cache of {format_bytes(wanted)}, and {format_bytes(cache.budget_bytes)} are there for it; take less"
        )
    running = sequences(subject, batch, context, generated)
    held = copied = 0
    copy_seconds = 0.0
    copy = cache.pool.copy

    def timed_copy(source: int, target: int, num_blocks: int = 1) -> None:
        nonlocal copied, copy_seconds
        started = time.perf_counter()
        copy(source, target, num_blocks)
        copy_seconds += time.perf_counter() - started
        copied += num_blocks * cache.spec.block_bytes

    def look() -> None:
        nonlocal held
        held = max(held, cache.used_bytes)

    measure.fill_cache(engine, running)
    cache.pool.copy = timed_copy
    take = cache.pool.take_these
    cache.pool.take_these = lambda blocks: (take(blocks), look())  # while the new and the old run are both held
    gc.collect()
    started = time.perf_counter()
    finish(engine, running, look)
    seconds = time.perf_counter() - started
    engine.check_idle()
    return Run(seconds, copy_seconds, copied, held, resident_bytes(cache))


def resident_bytes(cache: CacheManager) -> int:
    """Resident bytes of the pool's address space, which begins with block 0 of the first layer's keys."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    is_resident = np.zeros(-(-cache.budget_bytes // page), np.uint8)
    address = ctypes.c_void_p(cache.kv[0].k.data_ptr())
    if libc.mincore(address, ctypes.c_size_t(cache.budget_bytes), is_resident.ctypes.data_as(ctypes.c_void_p)):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int((is_resident & 1).sum()) * page


def compare(
    subject: Subject, names: dict[str, dict], context: int, generated: int, batch: int, repeats: int
) -> tuple[list[Row], float | None]:
    """Returns a row for each strategy, and the bytes copied per second of copying; None if nothing was copied."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    decode(subject, {}, context, min(generated, 4), batch)
    for repeat in range(repeats):
        for name, options in names.items():
            print(f"{name}, {repeat + 1} of {repeats} ...", file=sys.stderr, flush=True)
            runs[name].append(decode(subject, options, context, generated, batch))
    text_bytes = batch * subject.engine.cache.bytes_for(context + generated)

    def median(name: str, value: Callable[[Run], float]) -> float:
        return statistics.median(map(value, runs[name]))

    rows = [
        Row(
            strategy=name,
            tokens_per_s=batch * generated / median(name, lambda run: run.seconds),
            speed_of_paged=statistics.median(
                paged.seconds / run.seconds for paged, run in zip(runs["paged"], runs[name])
            ),
            copying_share=median(name, lambda run: run.copy_seconds / run.seconds),
            copied_mib=median(name, lambda run: run.copied_bytes) / 2**20,
            held_of_text=median(name, lambda run: run.held_bytes) / text_bytes,
            resident_of_text=median(name, lambda run: run.resident_bytes) / text_bytes,
        )
        for name in names
    ]
    speeds = [run.copied_bytes / run.copy_seconds for name in names for run in runs[name] if run.copy_seconds]
    return rows, statistics.median(speeds) if speeds else None


def attention_bytes_per_second(subject: Subject, context: int, batch: int) -> float:
    """Bytes of keys and values that decode attention reads per second at this length."""
    result = measure.measure(subject, prompt=16, generated=8, batch=batch, repeats=1, depth=context)
    _, seconds, num_bytes = result.decode.instructions["attention"]
    return num_bytes / seconds


def ask_again(subject: Subject, options: dict, context: int, repeats: int) -> Prefix:
    """Returns the medians for prompts that share a prefix with the first."""
    engine = engine_for(subject, options)
    (first,) = sequences(subject, 1, context, 1)
    finish(engine, [first])
    seconds, reused = [], 0
    for repeat in range(repeats):
        (ending,) = sequences(subject, 1, NEW_TOKENS, 1, seed=repeat + 1)
        prompt = first.tokens[: context - NEW_TOKENS] + ending.tokens
        again = Sequence(prompt, Sampling(), StoppingCriteria(context + 1, []), context + 1)
        started = time.perf_counter()
        finish(engine, [again])
        seconds.append(time.perf_counter() - started)
        reused = again.times.num_reused
    return Prefix(context, reused, statistics.median(seconds))


def markdown(
    command: str,
    rows: list[Row],
    text_mib: float,
    copy_rate: float | None,
    read_rate: float,
    prefix: dict[str, Prefix],
    shape: str,
) -> str:
    lines = [
        f"`{command}` on `{_C.isa()}` with {_C.get_num_threads()} threads. {shape}; at the end the texts fill {text_mib:,.0f} MiB.",
        "",
        "| strategy | tokens/s | of paged | copying | copied | held | resident |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.strategy} | {row.tokens_per_s:,.1f} | {row.speed_of_paged:.3f} | {100 * row.copying_share:.2f} % | {row.copied_mib:,.0f} MiB "
            f"| {row.held_of_text:.2f} | {row.resident_of_text:.2f} |"
        )
    copying = (
        f"Copying: {copy_rate / 1e9:.1f} GB/s; decode attention reads {read_rate / 1e9:.1f} GB/s: c = {read_rate / copy_rate:.1f}"
        if copy_rate
        else "Nothing was copied"
    )
    lines += [
        "",
        f"{copying} (COPY_COST = {COPY_COST:g}).",
        "",
        "| a prompt that begins like an earlier one | tokens | reused | first token |",
        "|---|---:|---:|---:|",
    ]
    for name, found in prefix.items():
        lines.append(f"| {name} | {found.tokens:,} | {found.reused_tokens:,} | {1e3 * found.first_token_s:,.1f} ms |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b", metavar="MODEL_OR_SHAPE")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--context",
        type=int,
        default=2048,
        metavar="N",
        help="positions that each sequence begins with (default: 2048)",
    )
    parser.add_argument("--generate", type=int, default=512, metavar="N", help="tokens that each gets (default: 512)")
    parser.add_argument("--batch", type=int, default=2, metavar="N")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        default=[16, 512],
        metavar="R",
        help="r of bmc, beside the balanced one (default: 16 512)",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: what `pace env` says")
    add_into_argument(parser)
    args = parser.parse_args()
    if args.context <= NEW_TOKENS:
        parser.error(
            f"--context must be more than the {NEW_TOKENS} new tokens of a prompt whose beginning is known; got {args.context}"
        )
    check_page(args.into, SCRIPT)
    subject = measure.load(args.shape, args.dtype, num_threads=args.num_threads)
    rows, copy_rate = compare(subject, strategies(args.rows), args.context, args.generate, args.batch, args.repeats)
    read_rate = attention_bytes_per_second(subject, args.context, args.batch)
    print("prefix cache ...", file=sys.stderr, flush=True)
    prefix = {
        name: ask_again(subject, options, args.context, args.repeats)
        for name, options in (("off", {}), ("on", {"prefix_cache_bytes": None}))
    }
    text_mib = args.batch * subject.engine.cache.bytes_for(args.context + args.generate) / 2**20
    shape = f"{subject.name}, {args.dtype}, {args.batch} x {args.context:,} + {args.generate:,} tokens, r from {balanced_rows(args.context)} to {balanced_rows(args.context + args.generate)}"
    text = markdown(command(SCRIPT), rows, text_mib, copy_rate, read_rate, prefix, shape)
    numbers = {
        "copy_gb_per_s": copy_rate and copy_rate / 1e9,
        "attention_gb_per_s": read_rate / 1e9,
        "text_mib": text_mib,
    }
    report = {"benchmark": "cache", "isa": _C.isa(), "threads": _C.get_num_threads(), "model": subject.name, "dtype": args.dtype, "context": args.context,
              "generated": args.generate, "batch": args.batch, "repeats": args.repeats, **numbers, "strategies": [asdict(row) for row in rows],
              "prefix": {name: asdict(found) for name, found in prefix.items()}}  # fmt: skip
    publish(args.into, SCRIPT, text, report)


if __name__ == "__main__":
    main()
