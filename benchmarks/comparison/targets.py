"""The performance targets, and a check of results against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.comparison.results import Results, Run, Scenario, Subject

LOAD_FACTOR, LOAD_BYTES = 1.1, 300_000_000
"""Limit of peak resident memory: the resident weights times the factor, plus the bytes."""
PACE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 1, "int4": 4.5 / 8}
"""Bytes of a weight in pace; a lower bound for int4, whose embedding is int8."""
LONG_CONTEXT = 4096


@dataclass(frozen=True)
class Finding:
    """One target on one shape. `measured` is None if there was no suitable run."""

    shape: str
    what: str
    target: float
    measured: float | None
    at_most: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    @property
    def verdict(self) -> str:
        """`met`, the relative distance by which it was missed, or `not measured`."""
        if self.met is None:
            return "not measured"
        return "met" if self.met else f"missed by {abs(self.measured / self.target - 1):.1%}"


def mbu(run: Run) -> float | None:
    return run.decode_mbu


def prefill_mfu(run: Run) -> float:
    return run.prefill_mfu


def decode_mfu(run: Run) -> float:
    return run.decode_mfu


def prefill_rate(run: Run) -> float:
    return run.prefill_rate


def decode_rate(run: Run) -> float:
    return run.decode_rate


DECODE_MBU = {"bf16": 0.92, "int8": 0.92, "int4": 0.90}
PREFILL_MFU = {"bf16": 0.85, "int8": 1.3, "int4": 1.3}
PREFILL_RATIOS = (
    ("bf16", "llama.cpp", 1.5),
    ("bf16", "transformers", 8.0),
    ("int8", "llama.cpp", 1.6),
    ("int8", "ctranslate2", 1.2),
    ("int4", "llama.cpp", 1.6),
)
BATCHED_MFU = {32: 0.75}
BATCHED_SPEEDUP = {8: 4.5, 32: 5.5}
LONG_CONTEXT_MBU = 0.85
SMALLEST_PARAMETERS = 4e8
"""Targets apply to shapes of 0.5B and larger."""


def findings(results: Results) -> Iterator[Finding]:
    """Yields all targets on all shapes that they apply to. If a peer has several variants of the same kind, its fastest
    counts."""
    for shape in results.shapes:
        if results.parameters[shape] >= SMALLEST_PARAMETERS:
            yield from _of_shape(results, shape)


def _of_shape(results: Results, shape: str) -> Iterator[Finding]:
    main = results.scenarios[0]
    ours = {s.dtype: s for s in results.subjects if s.shape == shape and s.runtime == "pace"}
    peers = [s for s in results.subjects if s.shape == shape and s.runtime != "pace"]
    single = f"{main.prompt} tokens"
    for dtype, target in DECODE_MBU.items():
        yield Finding(shape, f"decode, {dtype}: MBU", target, _median(results, ours.get(dtype), main, mbu))
    for dtype, target in PREFILL_MFU.items():
        yield Finding(
            shape, f"prefill of {single}, {dtype}: MFU", target, _median(results, ours.get(dtype), main, prefill_mfu)
        )
    for dtype, runtime, target in PREFILL_RATIOS:
        measured = _least_ratio(
            results, ours.get(dtype), [p for p in peers if p.runtime == runtime], main, prefill_rate
        )
        yield Finding(shape, f"prefill of {single}, {dtype}: times {runtime}", target, measured)
    for dtype, subject in ours.items():
        rivals = [peer for peer in peers if peer.dtype == dtype]
        for what, value in ((f"prefill of {single}", prefill_rate), ("decode", decode_rate)):
            for runtime in dict.fromkeys(rival.runtime for rival in rivals):
                measured = _least_ratio(results, subject, [r for r in rivals if r.runtime == runtime], main, value)
                if measured is not None:
                    yield Finding(shape, f"{what}, {dtype}: never slower than {runtime}", 1.0, measured)
    yield from _batched(results, shape, ours.get("bf16"), main)
    for scenario in results.scenarios:
        if scenario.batch == 1 and scenario.prompt >= LONG_CONTEXT:
            title = f"decode at {scenario.prompt:,} tokens, bf16: MBU, keys and values included"
            yield Finding(shape, title, LONG_CONTEXT_MBU, _median(results, ours.get("bf16"), scenario, mbu))
    for dtype, subject in ours.items():
        if subject.peak_mib and dtype in PACE_BYTES:
            weights = max(
                results.parameters[shape] * PACE_BYTES[dtype], subject.weight_bytes or 0
            )  # the embedding of int4 is int8
            bound = (LOAD_FACTOR * weights + LOAD_BYTES) / 2**20
            yield Finding(
                shape,
                f"peak memory, {dtype}: {LOAD_FACTOR} x weights + 300 MB",
                bound,
                subject.peak_mib,
                at_most=True,
                unit=" MiB",
            )


def _batched(results: Results, shape: str, ours: Subject | None, main: Scenario) -> Iterator[Finding]:
    for scenario in results.scenarios:
        if target := BATCHED_MFU.get(scenario.batch):
            yield Finding(
                shape,
                f"decode of {scenario.batch} sequences, bf16: MFU",
                target,
                _median(results, ours, scenario, decode_mfu),
            )
        if target := BATCHED_SPEEDUP.get(scenario.batch):
            batched, alone = (_median(results, ours, where, decode_rate) for where in (scenario, main))
            measured = batched / alone if batched and alone else None
            yield Finding(shape, f"decode of {scenario.batch} sequences, bf16: times one sequence", target, measured)


def _median(results: Results, subject: Subject | None, scenario: Scenario, value) -> float | None:
    return results.median(subject, scenario, value) if subject else None


def _least_ratio(
    results: Results, ours: Subject | None, peers: list[Subject], scenario: Scenario, value
) -> float | None:
    """Ratio to the fastest of `peers` with the same kind of weights."""
    if ours is None:
        return None
    ratios = [results.ratio(ours, peer, scenario, value) for peer in peers if peer.dtype == ours.dtype]
    return min((ratio for ratio in ratios if ratio is not None), default=None)
