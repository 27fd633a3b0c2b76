"""Speed of the linear kernels beside the machine's limits.

    python benchmarks/kernels_linear.py [--dtype bfloat16] [--rows 1 2 4 8 16 32 128 512] [--threads N]
    PACE_ISA=avx2 python benchmarks/kernels_linear.py

The products of one layer of Qwen2.5-0.5B (896 wide, 4,864 in the MLP), repeated over as many layers as fill 24 (random weights,
0.7 GB in bf16, so that no cache holds them). For each number of rows: `MBU` = bytes of weights / time / read bandwidth, and
`MFU` = 2 x multiply-adds / time / fp32 FMA peak; both limits are measured before and after, and the better one counts."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from pace.bench.limits import measure
from pace import _C
from pace.ops import native as ops

HIDDEN, QKV, INTERMEDIATE, LAYERS = 896, 1152, 4864, 24


def make_layer(dtype: torch.dtype) -> list[ops.PackedWeight]:
    shapes = [(QKV, HIDDEN, False), (HIDDEN, HIDDEN, False), (2 * INTERMEDIATE, HIDDEN, True), (HIDDEN, INTERMEDIATE, False)]
    weights = []
    for n, k, glu in shapes:
        weight = ops.empty_weight(n, k, dtype, glu)
        ops.pack_rows_(weight, torch.randn(n, k) * 0.02, 0)
        weights.append(weight)
    return weights


def run(layers: list[list[ops.PackedWeight]], x: torch.Tensor) -> None:
    for qkv, out, gate_up, down in layers:
        hidden = ops.linear(x, qkv)[:, :HIDDEN]
        x = ops.linear(hidden, out, residual=x)
        x = ops.linear(ops.linear_glu(x, gate_up, "silu"), down, residual=x)


def seconds_of(layers: list[list[ops.PackedWeight]], x: torch.Tensor, budget: float) -> float:
    """The median of repeated runs within about `budget` seconds, at least three."""
    times, end = [], time.perf_counter() + budget
    run(layers, x)
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        run(layers, x)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--threads", type=int, default=_C.cpu_info()["default_threads"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each number of rows")
    args = parser.parse_args()
    _C.set_num_threads(args.threads)
    torch.manual_seed(0)
    layers = [make_layer(getattr(torch, args.dtype)) for _ in range(LAYERS)]
    weights = [weight for layer in layers for weight in layer]
    weight_bytes = sum(weight.nbytes for weight in weights)
    multiply_adds = sum(weight.n * weight.k for weight in weights)

    before = measure()
    seconds = {rows: seconds_of(layers, torch.randn(rows, HIDDEN), args.seconds) for rows in args.rows}
    after = measure()
    read, peak = max(before.read_gb_s, after.read_gb_s), max(before.fma_gflops, after.fma_gflops)
    print(f"{before.isa}, {before.threads} threads, {args.dtype}: read {read:.1f} GB/s, fp32 FMA {peak:.0f} GFLOPS")
    print(f"{'rows':>5} {'ms':>9} {'GB/s':>7} {'MBU':>6} {'GFLOPS':>8} {'MFU':>6}")
    results = []
    for rows, elapsed in seconds.items():
        gb_s, gflops = weight_bytes / elapsed / 1e9, 2 * multiply_adds * rows / elapsed / 1e9
        print(f"{rows:5} {elapsed * 1e3:9.2f} {gb_s:7.1f} {gb_s / read:6.2f} {gflops:8.0f} {gflops / peak:6.2f}")
        results.append({"rows": rows, "seconds": elapsed, "mbu": gb_s / read, "mfu": gflops / peak})
    print(json.dumps({"isa": before.isa, "threads": before.threads, "dtype": args.dtype, "read_gb_s": read, "fma_gflops": peak, "results": results}))


if __name__ == "__main__":
    main()
