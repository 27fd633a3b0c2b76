"""Results of `pace bench`: the measured subject, the seconds of each run, and their shares of the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pace
from pace.bench import limits
from pace.bench.costs import Costs
from pace.bench.prediction import Prediction, efficiencies, predict
from pace.bench.towers import TowerResult
from pace.llm.engine.engine import Engine
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.naming import dtype_name


@dataclass(frozen=True)
class Subject:
    """The subject of a measurement: a loaded model and an engine that runs it."""

    name: str
    model: BaseModelForCausalLM
    engine: Engine
    backend: str
    load_seconds: float
    load_peak_mib: float
    """Peak resident memory of the process right after loading, including the `rss_before_mib` from before."""
    rss_before_mib: float
    resident_mib: float

    @property
    def costs(self) -> Costs:
        return Costs.of(self.model, self.model.dtype, self.model.kv_dtype)


@dataclass(frozen=True)
class Phase:
    """Time of a step: seconds per kind of instruction, and the remainder outside of the kernels."""

    seconds: float
    instructions: dict[str, tuple[int, float, float]]
    """Maps a kind of instruction to its count in a step, their seconds, and the bytes that they move. These are
    weights, cached keys and values, or states."""

    @property
    def outside(self) -> float:
        return self.seconds - sum(seconds for _, seconds, _ in self.instructions.values())


@dataclass(frozen=True)
class Repeat:
    """One run, and the machine's limits measured around it."""

    limits: limits.Limits
    first_token_seconds: float
    """Seconds from a prompt of `prompt` tokens to its first token."""
    step_seconds: float
    """Median seconds of a decode step of the whole batch."""


@dataclass(frozen=True)
class Result:
    """Medians over the repeats, of seconds and of shares of the limits: the limits of a shared machine drift between
    runs."""

    subject: Subject
    costs: Costs
    prompt: int
    generated: int
    batch: int
    depth: int | None
    """Number of positions with random keys and values in each sequence's cache when decoding began; None if the prompt
    was computed instead."""
    repeats: list[Repeat]
    prefill: Phase | None
    decode: Phase | None
    """None if the backend runs op by op: only a program times its instructions."""
    peak_mib: float
    """Peak resident memory of the process while the model ran."""
    towers: list[TowerResult] = field(default_factory=list)
    """The encodings of an image and of a clip, if they were measured."""

    def _median(self, of: Callable[[Repeat], float]) -> float:
        return statistics.median(map(of, self.repeats))

    @property
    def limits(self) -> limits.Limits:
        read = self._median(lambda repeat: repeat.limits.read_gb_s)
        fma = self._median(lambda repeat: repeat.limits.fma_gflops)
        return replace(self.repeats[0].limits, read_gb_s=read, fma_gflops=fma)

    @property
    def first_token_seconds(self) -> float:
        return self._median(lambda repeat: repeat.first_token_seconds)

    @property
    def step_seconds(self) -> float:
        return self._median(lambda repeat: repeat.step_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt / self.first_token_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        return self.batch / self.step_seconds

    @property
    def prefill_mfu(self) -> float:
        """Model FLOPS utilisation of prefill: 2 x multiply-adds / time / measured fp32 FMA peak."""
        flops = self.costs.prefill_flops(self.prompt)
        return self._median(lambda repeat: flops / repeat.first_token_seconds / (1e9 * repeat.limits.fma_gflops))

    @property
    def decode_flops(self) -> int:
        return self.costs.decode_flops(self.batch, self.context)

    @property
    def decode_mfu(self) -> float:
        return self._median(lambda repeat: self.decode_flops / repeat.step_seconds / (1e9 * repeat.limits.fma_gflops))

    @property
    def decode_mbu(self) -> float:
        """Memory bandwidth utilisation of decode: bytes that a step must move (`Costs.decode_bytes`) / time / measured
        read bandwidth."""
        num_bytes = self.costs.decode_bytes(self.batch, self.context)
        return self._median(lambda repeat: num_bytes / repeat.step_seconds / (1e9 * repeat.limits.read_gb_s))

    @property
    def predicted(self) -> Prediction:
        """The prediction that `pace plan` makes."""
        return self._predict(self.limits)

    @property
    def prefill_ratio(self) -> float:
        """Measured speed over predicted speed."""
        return self._median(lambda repeat: self._predict(repeat.limits).prefill_seconds / repeat.first_token_seconds)

    @property
    def decode_ratio(self) -> float:
        """Measured speed over predicted speed."""
        return self._median(lambda repeat: self._predict(repeat.limits).step_seconds / repeat.step_seconds)

    def _predict(self, now: limits.Limits) -> Prediction:
        layers, head = efficiencies(now.isa, self.subject.model.dtype, self.costs)
        return predict(self.costs, layers, now, self.prompt, self.context, self.batch, head)

    @property
    def context(self) -> int:
        """Tokens of each sequence half-way through the decode steps."""
        return (self.depth or self.prompt) + self.generated // 2

    @property
    def outside_share(self) -> float | None:
        """Share of a decode step outside of the kernels: Python, dispatch, sampling."""
        return self.decode.outside / self.decode.seconds if self.decode else None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers for JSON, with units in the names."""
        subject = self.subject
        return {
            "pace": pace.__version__,
            "model": subject.name,
            "dtype": dtype_name(subject.model.dtype),
            "held_as": subject.model.storage_name,
            "quantization": subject.model.quantization and subject.model.quantization.to_dict(),
            "kv_cache_dtype": dtype_name(subject.model.kv_dtype),
            "backend": subject.backend,
            "isa": self.limits.isa,
            "threads": self.limits.threads,
            "prompt": self.prompt,
            "generated": self.generated,
            "batch": self.batch,
            "context": self.depth or self.prompt,
            "repeats": len(self.repeats),
            "prefill_tokens_per_s": self.prefill_tokens_per_second,
            "decode_tokens_per_s": self.decode_tokens_per_second,
            "first_token_s": self.first_token_seconds,
            "step_s": self.step_seconds,
            "prefill_mfu": self.prefill_mfu,
            "decode_mfu": self.decode_mfu,
            "decode_mbu": self.decode_mbu,
            "predicted": {
                "prefill_tokens_per_s": self.prompt / self.predicted.prefill_seconds,
                "decode_tokens_per_s": self.batch / self.predicted.step_seconds,
                "prefill_ratio": self.prefill_ratio,
                "decode_ratio": self.decode_ratio,
            },
            "towers": [tower.as_dict() for tower in self.towers],
            "outside_kernels_share": self.outside_share,
            "read_gb_per_s": self.limits.read_gb_s,
            "fma_gflops": self.limits.fma_gflops,
            "load_s": subject.load_seconds,
            "resident_mib": subject.resident_mib,
            "state_bytes_per_sequence": self.costs.slot_bytes,
            "rss_before_mib": subject.rss_before_mib,
            "load_peak_rss_mib": subject.load_peak_mib,
            "peak_rss_mib": self.peak_mib,
        }
