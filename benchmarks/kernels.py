"""Every kernel beside the limits of this machine: GB/s and GFLOPS, and their shares of the read bandwidth (MBU) and the fp32 FMA peak (MFU).

    python benchmarks/kernels.py [linear attention rows] [--shape qwen2.5-0.5b llama-3.2-1b] [--dtype bfloat16] [--threads N]
    PACE_ISA=avx2 python benchmarks/kernels.py linear --rows 1 4

linear      the products of one layer and the LM head of each shape, for each number of rows; weights are read from memory, not from a cache
attention   decode over a context (bytes of keys and values, each counted once) and prefill of a prompt (4 D operations for each
            query and each position that it sees), with the heads of each shape
rows        norms, rotary embedding, softmax, argmax and top-k / top-p over a vocabulary: bytes read and written

The limits are measured again before every single measurement, and shares are medians of the ratios, because machines are shared and drift.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from pace import _C
from pace.bench.shapes import SHAPES
from pace.llm.batch import BLOCK_SIZE, KVBlocks, KVSpec, Spans
from pace.llm.models.model_list import read_config
from pace.ops import native

COLD_BYTES = 256 << 20
"""More than the caches that a kernel must not profit from."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
DECODE_CONTEXTS = (128, 512, 2048, 8192, 16384, 32768)
PREFILL_TOKENS = (512, 2048, 8192)


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
        """The median time of `step`, and of its shares of limits that are measured in turn with it."""
        step()
        seconds, mbu, mfu = [], [], []
        for _ in range(self.repeats):
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
            f"{row.kernel:<44}{row.seconds * 1e6:>12.1f} us"
            + (f"{row.gb_s:>9.1f} GB/s {row.mbu:>5.2f}" if num_bytes else " " * 20)
            + (f"{row.gflops:>9.0f} GFLOPS {row.mfu:>5.2f}" if operations else ""),
            flush=True,
        )
        return row


# ---------------------------------------------------------------------------------------------------------------- linear


def linear(shape: str, dtype: torch.dtype, rows: tuple[int, ...], clock: Clock) -> Iterator[Row]:
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
        weights = _cold_weights(n, k, dtype, glu)
        for m in rows:
            if name == "head" and m > 32:
                continue  # logits of a whole prompt are rarely wanted
            x, turn = torch.randn(m, k), 0

            def step() -> None:
                nonlocal turn
                weight = weights[turn % len(weights)]
                turn += 1
                if weight.glu:
                    native.linear_glu(x, weight, "silu")
                else:
                    native.linear(x, weight)

            yield clock.measure(f"{shape} {name} {n} x {k}, {m} rows", step, weights[0].nbytes, 2 * m * n * k)


def _cold_weights(n: int, k: int, dtype: torch.dtype, glu: bool) -> list[native.PackedWeight]:
    """So many weights of a shape that reading them in turn reads memory."""
    source = (torch.randn(n, k) * 0.02).to(dtype)
    weights = [native.empty_weight(n, k, dtype, glu) for _ in range(max(2, COLD_BYTES // (n * k * dtype.itemsize)))]
    for weight in weights:
        native.pack_rows_(weight, source, 0)
    return weights


# ------------------------------------------------------------------------------------------------------------- attention


def attention(shape: str, dtype: torch.dtype, clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    scale = dim**-0.5
    for context in DECODE_CONTEXTS:
        cache_bytes = 2 * context * kv_heads * dim * dtype.itemsize
        blocks, copies = -(-context // BLOCK_SIZE), min(512, max(2, COLD_BYTES // cache_bytes))
        kv, q, turn = _random_cache(kv_heads, dim, dtype, blocks * copies), torch.randn(1, heads, dim), 0
        spans = [_spans(1, context, table) for table in torch.arange(blocks * copies, dtype=torch.int32).view(copies, 1, blocks)]

        def decode() -> None:
            nonlocal turn
            native.attention(q, kv, spans[turn % copies], scale)
            turn += 1

        yield clock.measure(f"{shape} decode at {context}", decode, cache_bytes, 4 * heads * dim * context)
    for tokens in PREFILL_TOKENS:
        blocks = -(-tokens // BLOCK_SIZE)
        kv, q = _random_cache(kv_heads, dim, dtype, blocks), torch.randn(tokens, heads, dim)
        span = _spans(tokens, tokens, torch.arange(blocks, dtype=torch.int32).view(1, blocks))
        operations = 4 * heads * dim * tokens * (tokens + 1) // 2
        yield clock.measure(f"{shape} prefill of {tokens}", lambda kv=kv, q=q, span=span: native.attention(q, kv, span, scale), 0, operations)


def _random_cache(kv_heads: int, dim: int, dtype: torch.dtype, blocks: int) -> KVBlocks:
    kv = KVSpec(1, kv_heads, dim, dtype).allocate(blocks)[0]
    kv.k.normal_()
    kv.v.normal_()
    return kv


def _spans(tokens: int, kv_len: int, table: torch.Tensor) -> Spans:
    return Spans(torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([kv_len], dtype=torch.int32), table)


# ------------------------------------------------------------------------------------------------------------------ rows


def single_rows(shape: str, rows: tuple[int, ...], clock: Clock) -> Iterator[Row]:
    _, config = read_config(SHAPES[shape])
    hidden, vocab = config.hidden_size, config.vocab_size
    for m in (rows[0], rows[-1]):
        x, weight, q = torch.randn(m, hidden), torch.ones(hidden), torch.randn(m, config.num_attention_heads, config.head_dim)
        cos, sin = torch.randn(2, m, config.head_dim // 2).unbind()
        yield clock.measure(f"{shape} rms_norm, {m} rows", lambda: native.rms_norm(x, weight, 1e-6), 2 * x.nbytes)
        yield clock.measure(f"{shape} rotary, {m} rows", lambda: native.rotary_(q, cos, sin, False), 2 * q.nbytes + 2 * cos.nbytes)
    logits = torch.randn(1, vocab)
    top_k, top_p = torch.tensor([50]), torch.tensor([0.9])
    yield clock.measure(f"{shape} argmax over {vocab}", lambda: native.argmax(logits), logits.nbytes)
    yield clock.measure(f"{shape} softmax over {vocab}", lambda: native.softmax(logits), 2 * logits.nbytes)
    yield clock.measure(f"{shape} top-k, top-p over {vocab}", lambda: native.top_k_top_p_(logits.clone(), top_k, top_p), logits.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", choices=["linear", "attention", "rows", []], help="default: all")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-3b", "qwen2.5-7b"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, default=_C.cpu_info()["default_threads"])
    parser.add_argument("--repeats", type=int, default=9, help="measurements that a median is taken of")
    args = parser.parse_args()
    _C.set_num_threads(args.threads)
    torch.manual_seed(0)
    chosen, dtype, clock, rows = args.kernels or ["linear", "attention", "rows"], getattr(torch, args.dtype), Clock(args.repeats), []
    bandwidth, peak = _C.read_bandwidth(COLD_BYTES, 0.5) / 1e9, _C.fma_peak(0.5) / 1e9
    print(f"{_C.isa()}, {args.threads} threads, {args.dtype}: {bandwidth:.1f} GB/s read, {peak:.0f} GFLOPS fp32 FMA; shares are MBU and MFU")
    for shape in args.shape:
        if "linear" in chosen:
            rows += linear(shape, dtype, tuple(args.rows), clock)
        if "attention" in chosen:
            rows += attention(shape, dtype, clock)
        if "rows" in chosen:
            rows += single_rows(shape, tuple(args.rows), clock)
    print(json.dumps({"isa": _C.isa(), "threads": args.threads, "dtype": args.dtype, "read_gb_per_s": bandwidth, "fma_gflops": peak, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
