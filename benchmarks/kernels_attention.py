"""How close attention comes to this machine: decode in GB/s of keys and values, prefill in GFLOPS, limits measured in the same run.

    python benchmarks/kernels_attention.py [--isa avx2] [--threads 2] [--dtype bfloat16] [--heads 32] [--kv-heads 8] [--head-dim 128]

Decode is one token over a context, counting each byte of the cached keys and values once. Prefill is all tokens of a prompt at once,
counting 4 D operations for each query and each position that it sees (2 T^2 D for a head), so that work on hidden positions does not
count. Several caches are used in turn, so that decode reads memory and not the processor's cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from pace import _C
from pace.llm.batch import BLOCK_SIZE, KVBlocks, KVSpec, Spans
from pace.ops import native

DECODE_CONTEXTS = (128, 512, 2048, 8192, 16384, 32768)
PREFILL_TOKENS = (512, 2048, 8192)
COLD_BYTES = 256 << 20  # more than the last-level caches that decode must not profit from


def main() -> None:
    args = parse_arguments()
    if args.isa:
        _C.select_isa(args.isa)
    _C.set_num_threads(args.threads)
    bandwidth = _C.read_bandwidth(buffer_bytes=COLD_BYTES, seconds=1.0)
    peak = _C.fma_peak(seconds=0.5)
    print(f"{_C.isa()}, {args.threads} threads: reads {bandwidth / 1e9:.1f} GB/s, multiplies {peak / 1e9:.0f} GFLOPS (fp32)")

    results = {"isa": _C.isa(), "threads": args.threads, "bandwidth": bandwidth, "peak": peak, "decode": {}, "prefill": {}}
    print(f"decode, {args.heads} heads of {args.head_dim} on {args.kv_heads}, {args.dtype}:")
    for context in DECODE_CONTEXTS:
        seconds, cache_bytes = time_decode(args, context)
        share = cache_bytes / seconds / bandwidth
        results["decode"][context] = share
        print(f"  context {context:6d}: {seconds * 1e6:9.1f} us  {cache_bytes / seconds / 1e9:6.1f} GB/s  {share:6.1%} of the reads")
    print("prefill:")
    for tokens in PREFILL_TOKENS:
        seconds, operations = time_prefill(args, tokens)
        share = operations / seconds / peak
        results["prefill"][tokens] = share
        print(f"  tokens  {tokens:6d}: {seconds * 1e3:9.2f} ms  {operations / seconds / 1e9:6.0f} GFLOPS  {share:6.1%} of the peak")
    print(json.dumps(results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", help="instruction set; default: the best this CPU has")
    parser.add_argument("--threads", type=int, default=_C.cpu_info()["default_threads"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"], help="of the cache")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    return parser.parse_args()


def time_decode(args: argparse.Namespace, context: int) -> tuple[float, int]:
    """Seconds of one decode step over `context` positions, and the bytes of keys and values it must read."""
    blocks = -(-context // BLOCK_SIZE)
    row_bytes = args.kv_heads * args.head_dim * getattr(torch, args.dtype).itemsize
    cache_bytes = 2 * context * row_bytes
    copies = min(512, max(2, COLD_BYTES // cache_bytes))
    kv = make_cache(args, blocks * copies)
    q = torch.randn(1, args.heads, args.head_dim)
    tables = torch.randperm(blocks * copies, dtype=torch.int32).view(copies, 1, blocks)
    spans = [make_spans(1, context, table) for table in tables]
    turn = 0

    def step() -> None:
        nonlocal turn
        native.attention(q, kv, spans[turn % copies], args.head_dim**-0.5)
        turn += 1

    return median_seconds(step), cache_bytes


def time_prefill(args: argparse.Namespace, tokens: int) -> tuple[float, int]:
    """Seconds of a prefill of `tokens`, and the operations on positions that are seen."""
    blocks = -(-tokens // BLOCK_SIZE)
    kv = make_cache(args, blocks)
    q = torch.randn(tokens, args.heads, args.head_dim)
    spans = make_spans(tokens, tokens, torch.randperm(blocks, dtype=torch.int32).view(1, blocks))
    operations = 4 * args.heads * args.head_dim * tokens * (tokens + 1) // 2
    return median_seconds(lambda: native.attention(q, kv, spans, args.head_dim**-0.5)), operations


def make_cache(args: argparse.Namespace, blocks: int) -> KVBlocks:
    kv = KVSpec(1, args.kv_heads, args.head_dim, getattr(torch, args.dtype)).allocate(blocks)[0]
    kv.k.normal_()
    kv.v.normal_()
    return kv


def make_spans(tokens: int, kv_len: int, table: torch.Tensor) -> Spans:
    return Spans(torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([kv_len], dtype=torch.int32), table)


def median_seconds(step: Callable[[], None], seconds: float = 1.0, least: int = 3) -> float:
    """The median time of a call, over at least `least` calls and about `seconds`, after one that warms up."""
    step()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    main()
