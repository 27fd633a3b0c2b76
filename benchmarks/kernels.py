"""Measures every kernel against the limits of this machine, in GB/s and GFLOPS.

Shares are of the read bandwidth (MBU) and of the fp32 FMA peak (MFU).

    python benchmarks/kernels.py [--only linear attention norms rope sampling] [--shape qwen2.5-0.5b llama-3.2-1b]
        [--dtype bfloat16] [--kv-dtype bfloat16 int8] [--threads N] [--output FILE.md]

    PACE_ISA=avx2 python benchmarks/kernels.py --only linear --rows 1 4

    python benchmarks/kernels.py --only linear --shape qwen2.5-0.5b --rows 1 8 64 512    # about 3 minutes
        --dtype bfloat16 int8 int4:32 int4:128 float8:128

    python benchmarks/kernels.py --only attention --kv-dtype bfloat16 int8

linear      The products of one layer and the LM head of each shape, for each number of rows.
            Weights are read from memory, not from a cache. Several `--dtype` take turns at each point, and are named
            in the rows. Codes are random, in groups of the size after the colon. Types of GGUF files such as q4_k are
            quantised from random weights.
attention   Decode over a context and prefill of a prompt, with the heads of each shape.
            `decode` and `prefill` select one of the two. Decode counts bytes of keys and values, each once, read from
            memory. Prefill counts 4 D operations for each query and each position that it sees. Several `--kv-dtype`
            take turns at each point, and are named in the rows.
norms       RMS norm, layer norm, and the norm of single heads, for the fewest and the most rows.
            Bytes are read and written, mostly in a cache.
rope        The rotation of all query heads, for the same rows.
sampling    Argmax of one row over the shape's vocabulary (benchmarks/sampling.py measures draws).

The limits are measured again before every single measurement, and shares are medians of the ratios, because machines
are shared and drift. A multiply-add counts as 2 operations in any number type, against the peak of fp32: products of
integers and of bf16 pairs can exceed it. Everything takes about five minutes on two cores and 4 GB of memory. The last
line is one JSON object. --output writes JSON or Markdown, depending on the suffix of the file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pace import _C
from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec, Positions, Spans
from pace.bench.measure import draw_blocks
from pace.bench.shapes import SHAPES
from pace.checkpoints.gguf.blocks import BLOCK_TYPES
from pace.llm.models.model_list import read_config
from pace.ops import native
from pace.ops.blocks import BlockRows, BlockType
from pace.ops.protocol import AttentionOptions
from pace.ops.weight_layout import CODES, GRIDS, QuantizedRows, WeightLayout
from pace.quant.format import Format
from pace.quant.registry import FORMATS

COLD_BYTES = 256 << 20
"""Larger than the caches that a kernel must not profit from."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
DECODE_CONTEXTS = (128, 512, 2048, 8192, 16384, 32768)
PREFILL_TOKENS = (512, 2048, 8192)
KERNELS = {
    "linear": ("linear",),
    "attention": ("decode", "prefill"),
    "decode": ("decode",),
    "prefill": ("prefill",),
    "norms": ("norms",),
    "rope": ("rope",),
    "sampling": ("sampling",),
}
"""Maps a value of `--only` to the kernels it measures."""
STORED = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")} | {
    "int8": WeightLayout("int8", None),
    **{f"{code}:{group}": WeightLayout(code, group) for code in ("int8", "int4", "float8") for group in (32, 64, 128)},
}
"""Maps a value of `--dtype` to the layout of weights."""
STORED |= {name: make() for name, make in FORMATS.items() if name.startswith(("q", "mx"))}
STORED |= {type.layout.code: type for type in BLOCK_TYPES.values() if type.layout.code in GRIDS}
LONG_SECONDS, FEW_REPEATS = 2.0, 3
"""Once a kernel has taken LONG_SECONDS, it is measured at most FEW_REPEATS times."""


@dataclass(frozen=True)
class Row:
    kernel: str
    seconds: float
    gb_s: float | None
    mbu: float | None
    gflops: float | None
    mfu: float | None


@dataclass(frozen=True)
class Clock:
    repeats: int

    def measure(self, kernel: str, step: Callable[[], None], num_bytes: int = 0, operations: int = 0) -> Row:
        """Returns the median time of `step`, and the medians of its shares of the limits. The limits are measured
        before each run."""
        step()
        seconds, mbu, mfu = [], [], []
        started = time.perf_counter()
        while len(seconds) < self.repeats and (
            len(seconds) < FEW_REPEATS or time.perf_counter() - started < LONG_SECONDS
        ):
            bandwidth, peak = _C.read_bandwidth(COLD_BYTES, 0.02), _C.fma_peak(0.01)
            calls, begin = 0, time.perf_counter()
            while calls < 1 or time.perf_counter() - begin < 0.03:
                step()
                calls += 1
            elapsed = (time.perf_counter() - begin) / calls
            seconds.append(elapsed)
            mbu.append(num_bytes / elapsed / bandwidth)
            mfu.append(operations / elapsed / peak)
        middle = statistics.median(seconds)
        row = Row(
            kernel,
            middle,
            num_bytes / middle / 1e9 if num_bytes else None,
            statistics.median(mbu) if num_bytes else None,
            operations / middle / 1e9 if operations else None,
            statistics.median(mfu) if operations else None,
        )
        print(
            f"{row.kernel:<52}{row.seconds * 1e6:>12.1f} us"
            + (f"{row.gb_s:>9.1f} GB/s {row.mbu:>5.2f}" if num_bytes else " " * 20)
            + (f"{row.gflops:>9.0f} GFLOPS {row.mfu:>5.2f}" if operations else ""),
            flush=True,
        )
        return row


# ----------------------------------------------------------------------------------------------------------------
# linear


def linear(shape: str, dtypes: list[str], rows: tuple[int, ...], clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    hidden, heads = config.hidden_size, (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    inner = config.intermediate_size
    matrices = {
        "qkv": (heads, hidden, False),
        "output": (hidden, config.num_attention_heads * config.head_dim, False),
        "gate, up": (2 * inner, hidden, True),
        "down": (hidden, inner, False),
        "head": (config.vocab_size, hidden, False),
    }
    for name, (n, k, glu) in matrices.items():
        weights = {dtype: _cold_weights(n, k, STORED[dtype], glu) for dtype in dtypes}
        for m in rows:
            if name == "head" and m > 32:
                continue  # logits of a whole prompt are rarely needed
            x = torch.randn(m, k)
            for dtype in dtypes:
                named = f", {dtype}" if len(dtypes) > 1 else ""
                yield clock.measure(
                    f"{shape} {name} {n} x {k}, {m} rows{named}",
                    _product(x, weights[dtype]),
                    weights[dtype][0].nbytes,
                    2 * m * n * k,
                )


def _product(x: torch.Tensor, weights: list[native.PackedWeight]) -> Callable[[], None]:
    """Returns a step that multiplies by one of the weights, in turn."""
    turns = itertools.cycle(weights)

    def step() -> None:
        weight = next(turns)
        if weight.glu:
            native.linear_glu(x, weight, "silu")
        else:
            native.linear(x, weight)

    return step


Stored = torch.dtype | WeightLayout | Format | BlockType
Rows = torch.Tensor | QuantizedRows | BlockRows


def _cold_weights(n: int, k: int, stored: Stored, glu: bool) -> list[native.PackedWeight]:
    """Returns enough weights of a shape that reading them in turn reads memory."""
    first = random_weight(n, k, stored, glu)
    return [first, *(random_weight(n, k, stored, glu) for _ in range(max(1, -(-COLD_BYTES // first.nbytes) - 1)))]


def random_weight(n: int, k: int, stored: Stored, glu: bool) -> native.PackedWeight:
    """Returns a packed weight `[n, k]` that repeats the same 256 rows."""
    rows = _random_rows(min(256, n), k, stored)
    weight = native.empty_weight(n, k, stored if isinstance(rows, torch.Tensor) else rows.layout, glu)
    pack = native.pack_rows_ if isinstance(rows, torch.Tensor) else native.pack_quantized_
    for first in range(0, n, 256):
        pack(weight, rows if n - first >= 256 else _random_rows(n - first, k, stored), first)
    return weight


@functools.cache
def _random_rows(n: int, k: int, stored: Stored) -> Rows:
    """Returns the same rows at every call of a shape; weights of about 0.02."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(stored, Format):
        return stored.for_width(k).quantize(torch.randn(n, k, generator=generator) * 0.02)
    if isinstance(stored, BlockType):
        points = torch.randint(0, 256, (n, stored.row_bytes(k)), generator=generator, dtype=torch.uint8)
        points.view(n, -1, stored.nbytes)[..., 1::2] &= 0x1F  # finite scales, of any size
        return BlockRows(stored, points)
    if not isinstance(stored, WeightLayout):
        return (torch.randn(n, k, generator=generator) * 0.02).to(stored)
    low, high, size = {"int8": (-127, 128, 64), "int4": (0, 16, 4), "float8": (0, 64, 1)}[stored.code]
    codes = torch.randint(low, high, (n, k), generator=generator, dtype=CODES[stored.code])
    return QuantizedRows(stored, codes, torch.full((n, stored.num_groups(k)), 0.02 / size))


# -------------------------------------------------------------------------------------------------------------
# attention


def decode(shape: str, kv_dtypes: list[torch.dtype], clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    heads, dim = config.num_attention_heads, config.head_dim
    for context, spec in _points(DECODE_CONTEXTS, shape, kv_dtypes):
        cache_bytes = context * spec.position_bytes
        blocks, copies = -(-context // BLOCK_SIZE), max(2, -(-COLD_BYTES // cache_bytes))
        kv, q, turn = _random_cache(spec, blocks * copies), torch.randn(1, heads, dim), 0
        spans = [
            _spans(1, context, table)
            for table in torch.arange(blocks * copies, dtype=torch.int32).view(copies, 1, blocks)
        ]

        def step() -> None:
            nonlocal turn
            native.attention(q, kv, spans[turn % copies], AttentionOptions(dim**-0.5))
            turn += 1

        yield clock.measure(
            f"{shape} decode at {context}{_named(spec, kv_dtypes)}", step, cache_bytes, 4 * heads * dim * context
        )


def prefill(shape: str, kv_dtypes: list[torch.dtype], clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    heads, dim = config.num_attention_heads, config.head_dim
    for tokens, spec in _points(PREFILL_TOKENS, shape, kv_dtypes):
        blocks = -(-tokens // BLOCK_SIZE)
        kv, q = _random_cache(spec, blocks), torch.randn(tokens, heads, dim)
        span = _spans(tokens, tokens, torch.arange(blocks, dtype=torch.int32).view(1, blocks))
        operations = 4 * heads * dim * tokens * (tokens + 1) // 2
        name = f"{shape} prefill of {tokens}{_named(spec, kv_dtypes)}"
        yield clock.measure(
            name,
            lambda kv=kv, q=q, span=span: native.attention(q, kv, span, AttentionOptions(dim**-0.5)),
            0,
            operations,
        )


def _points(lengths: tuple[int, ...], shape: str, kv_dtypes: list[torch.dtype]) -> Iterator[tuple[int, KVSpec]]:
    """Yields every length with one layer's cache in every dtype."""
    _, config = read_config(SHAPES[shape])
    for length in lengths:
        for kv_dtype in kv_dtypes:
            layer = Positions(config.num_key_value_heads, config.head_dim, config.head_dim)
            yield length, KVSpec((layer,), kv_dtype)


def _named(spec: KVSpec, kv_dtypes: list[torch.dtype]) -> str:
    return f", {str(spec.dtype).removeprefix('torch.')}" if len(kv_dtypes) > 1 else ""


def _random_cache(spec: KVSpec, blocks: int) -> KVBlocks:
    (kv,) = spec.allocate(blocks)
    draw_blocks(spec, [kv], [torch.arange(blocks)])
    return kv


def _spans(tokens: int, kv_len: int, table: torch.Tensor) -> Spans:
    return Spans(torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([kv_len], dtype=torch.int32), table)


# ------------------------------------------------------------------------------------------------------------------
# rows


def norms(shape: str, rows: tuple[int, ...], clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    weight, head_weight = torch.ones(config.hidden_size), torch.ones(config.head_dim)
    for m in _fewest_and_most(rows):
        x, q = torch.randn(m, config.hidden_size), torch.randn(m, config.num_attention_heads, config.head_dim)
        yield clock.measure(f"{shape} rms_norm, {m} rows", lambda: native.rms_norm(x, weight, 1e-6), 2 * x.nbytes)
        yield clock.measure(
            f"{shape} layer_norm, {m} rows", lambda: native.layer_norm(x, weight, weight, 1e-6), 2 * x.nbytes
        )
        yield clock.measure(
            f"{shape} head_rms_norm, {m} rows", lambda: native.head_rms_norm_(q, head_weight, 1e-6), 2 * q.nbytes
        )


def rope(shape: str, rows: tuple[int, ...], clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    for m in _fewest_and_most(rows):
        q, angles = torch.randn(m, config.num_attention_heads, config.head_dim), torch.rand(m, config.head_dim // 2) * 6
        cos, sin = angles.cos(), angles.sin()
        yield clock.measure(
            f"{shape} rotary, {m} rows",
            lambda: native.rotary_(q, cos, sin, False),
            2 * q.nbytes + cos.nbytes + sin.nbytes,
        )


def sampling(shape: str, clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    vocab = config.vocab_size
    logits = torch.randn(1, vocab)
    yield clock.measure(f"{shape} argmax over {vocab}", lambda: native.argmax(logits), logits.nbytes)


def _fewest_and_most(rows: tuple[int, ...]) -> list[int]:
    return sorted({min(rows), max(rows)})


def measure(
    kernel: str, shape: str, dtypes: list[str], kv_dtypes: list[torch.dtype], rows: tuple[int, ...], clock: Clock
) -> Iterator[Row]:
    """Yields the rows of one kernel, named as in the values of `KERNELS`. Weights are in each of `dtypes`, keys and
    values in each of `kv_dtypes`."""
    match kernel:
        case "linear":
            yield from linear(shape, dtypes, rows, clock)
        case "decode":
            yield from decode(shape, kv_dtypes, clock)
        case "prefill":
            yield from prefill(shape, kv_dtypes, clock)
        case "norms":
            yield from norms(shape, rows, clock)
        case "rope":
            yield from rope(shape, rows, clock)
        case "sampling":
            yield from sampling(shape, clock)


def markdown(rows: list[Row], title: str) -> str:
    """Formats a table with GB/s and their share of the read bandwidth (MBU), and GFLOPS and their share of the fp32 FMA
    peak (MFU)."""

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [title, "", "| kernel | us | GB/s | MBU | GFLOPS | MFU |", "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        speeds = cell(row.gb_s, ".1f"), cell(row.mbu, ".2f"), cell(row.gflops, ".0f"), cell(row.mfu, ".2f")
        lines.append(f"| {row.kernel} | {row.seconds * 1e6:,.1f} | " + " | ".join(speeds) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=KERNELS,
        default=["linear", "attention", "norms", "rope", "sampling"],
        metavar="KERNEL",
        help=f"of {', '.join(KERNELS)}",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=SHAPES,
        default=["qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-3b", "qwen2.5-7b"],
        metavar="SHAPE",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16"],
        choices=STORED,
        metavar="DTYPE",
        help=f"of weights: {', '.join(STORED)} (default: bfloat16)",
    )
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        choices=["float32", "bfloat16", "float16", "int8"],
        metavar="DTYPE",
        help="of keys and values: %(choices)s (default: the first --dtype of floats, or bfloat16)",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, default=_C.cpu_info()["default_threads"])
    parser.add_argument("--repeats", type=int, default=9, help="measurements that a median is taken of")
    parser.add_argument("--output", type=Path, metavar="FILE", help="FILE.md for a table, FILE.json for the last line")
    args = parser.parse_args()
    if args.output and args.output.suffix not in (".md", ".json"):
        parser.error(f"--output must end in .md or .json, got {args.output}")
    _C.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock, rows = Clock(args.repeats), []
    floats = [name for name in args.dtype if isinstance(STORED[name], torch.dtype)]
    kv_names = args.kv_dtype or [*floats, "bfloat16"][:1]
    kv_dtypes = [getattr(torch, name) for name in kv_names]
    dtypes = " and ".join(args.dtype) + (f", cache {' and '.join(kv_names)}" if kv_names != args.dtype else "")
    bandwidth, peak = _C.read_bandwidth(COLD_BYTES, 0.5) / 1e9, _C.fma_peak(0.5) / 1e9
    title = (
        f"{_C.isa()}, {args.threads} threads, {dtypes}: {bandwidth:.1f} GB/s read, {peak:.0f} GFLOPS fp32 FMA; "
        f"shares are MBU and MFU"
    )
    print(title)
    for shape in args.shape:
        for kernel in dict.fromkeys(kernel for name in args.only for kernel in KERNELS[name]):
            rows += measure(kernel, shape, args.dtype, kv_dtypes, tuple(args.rows), clock)
    numbers = json.dumps(
        {
            "isa": _C.isa(),
            "threads": args.threads,
            "dtypes": args.dtype,
            "kv_dtypes": kv_names,
            "read_gb_per_s": bandwidth,
            "fma_gflops": peak,
            "rows": [asdict(row) for row in rows],
        }
    )
    print(numbers)
    if args.output:
        args.output.write_text(
            markdown(rows, title) if args.output.suffix == ".md" else numbers + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
