"""Measures the limits of this machine: read bandwidth and fp32 multiply-add peak, with pace's own kernels on all
threads.

Benchmarks compare with limits taken in the same run, because machines differ and are shared."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pace import _C

# Larger than any share of a last-level cache that a process gets, yet small enough for a small machine.
BUFFER_BYTES = 512 << 20


@dataclass(frozen=True)
class Limits:
    """`read_gb_s`: plain loads, in 1e9 bytes per second. `fma_gflops`: 1e9 fp32 operations per second; a multiply-add
    of one lane counts as 2."""

    isa: str
    threads: int
    read_gb_s: float
    fma_gflops: float


def between(before: Limits, after: Limits) -> Limits:
    """Returns the mean of two measurements: the limits for a run between them. The read bandwidth of a virtual machine
    may change by a factor of two within a second. Its cores are moved, and may then share a link to memory."""
    return replace(
        before,
        read_gb_s=(before.read_gb_s + after.read_gb_s) / 2,
        fma_gflops=(before.fma_gflops + after.fma_gflops) / 2,
    )


def measure(seconds: float = 1.0) -> Limits:
    """Measures both limits with the current instruction set and threads, for about `seconds` each."""
    read = _C.read_bandwidth(BUFFER_BYTES, seconds)
    return Limits(_C.isa(), _C.get_num_threads(), read / 1e9, _C.fma_peak(seconds) / 1e9)
