"""Measurements as plain data in one JSON file, and the medians, shares of the limits and ratios computed from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Scenario:
    """`batch` prompts of `prompt` tokens, and `generate` decode steps after them."""

    prompt: int
    generate: int
    batch: int = 1

    @property
    def title(self) -> str:
        return f"{self.batch} x {self.prompt:,} + {self.generate}"


@dataclass
class Subject:
    """A runtime with weights of one kind, on one shape."""

    shape: str
    runtime: str
    variant: str
    dtype: str
    """Kind of weights: bf16, fp16, fp32, int8, int4 or a type of GGUF file. Subjects of the same kind are compared."""
    missing: str | None = None
    """Reason why it was not measured; None if it was."""
    import_s: float | None = None
    load_s: float | None = None
    peak_mib: float | None = None
    """Peak memory of the whole process, after the runs of the first scenario."""
    weight_bytes: int | None = None
    """Weight bytes that a decode step reads; None if unknown."""
    settings: dict[str, str] = field(default_factory=dict)
    error: float | None = None
    """Error of the logits after a prompt, against fp32: the root of the mean square difference, relative to the
    standard deviation."""
    same_argmax: bool | None = None

    @property
    def label(self) -> str:
        return f"{self.runtime} {self.variant}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.shape, self.runtime, self.variant


@dataclass(frozen=True)
class Run:
    """One run of a subject. Runs of equal shape, group, round and scenario were made one after another."""

    shape: str
    runtime: str
    variant: str
    group: int
    round: int
    scenario: Scenario
    prefill_s: float
    step_s: float
    prefill_flops: int
    step_flops: int
    step_bytes: int | None
    """Weights, keys and values that the median step must read."""
    read_gb_s: float
    fma_gflops: float
    others_cpu: float
    """CPU use of all other processes during the run, in cores."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.shape, self.runtime, self.variant

    @property
    def place(self) -> tuple[int, int, Scenario]:
        return self.group, self.round, self.scenario

    @property
    def prefill_rate(self) -> float:
        return self.scenario.batch * self.scenario.prompt / self.prefill_s

    @property
    def decode_rate(self) -> float:
        return self.scenario.batch / self.step_s

    @property
    def prefill_mfu(self) -> float:
        return self.prefill_flops / self.prefill_s / (1e9 * self.fma_gflops)

    @property
    def decode_mfu(self) -> float:
        return self.step_flops / self.step_s / (1e9 * self.fma_gflops)

    @property
    def decode_mbu(self) -> float | None:
        return self.step_bytes / self.step_s / (1e9 * self.read_gb_s) if self.step_bytes else None


@dataclass
class Results:
    """Results on one machine, with one instruction set of pace."""

    name: str
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    scenarios: list[Scenario]
    parameters: dict[str, int]
    """Number of parameters of each shape."""
    subjects: list[Subject] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Runs that were skipped, and why."""
    rounds: int = 0
    rounds_again: int = 0
    """Number of rounds measured again, because the limits of the machine changed too much."""
    unsteady_rounds: int = 0
    """Number of rounds whose limits still changed too much in the last try."""

    @property
    def shapes(self) -> list[str]:
        return list(self.parameters)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file. Raises ValueError for a file of another format."""
        data = json.loads(path.read_text())
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a result of this version of compare.py: measure again, or delete it")
        data["scenarios"] = [Scenario(**scenario) for scenario in data["scenarios"]]
        data["subjects"] = [Subject(**subject) for subject in data["subjects"]]
        data["runs"] = [Run(**run | {"scenario": Scenario(**run["scenario"])}) for run in data["runs"]]
        return cls(**data)

    def runs_of(self, subject: Subject, scenario: Scenario) -> list[Run]:
        return [run for run in self.runs if run.key == subject.key and run.scenario == scenario]

    def median(self, subject: Subject, scenario: Scenario, value: Callable[[Run], float | None]) -> float | None:
        """Median of a value over the runs; None without runs or values."""
        values = [value(run) for run in self.runs_of(subject, scenario)]
        return statistics.median(values) if values and None not in values else None

    def ratio(self, ours: Subject, peer: Subject, scenario: Scenario, value: Callable[[Run], float]) -> float | None:
        """Median of `ratios`; None if no round has runs of both subjects."""
        ratios = self.ratios(ours, peer, scenario, value)
        return statistics.median(ratios) if ratios else None

    def ratios(self, ours: Subject, peer: Subject, scenario: Scenario, value: Callable[[Run], float]) -> list[float]:
        """Our value over the peer's, for each pair of runs in the same round."""
        by_place = {run.place: value(run) for run in self.runs_of(ours, scenario)}
        return [by_place[run.place] / value(run) for run in self.runs_of(peer, scenario) if run.place in by_place]

    def ours(self, peer: Subject) -> Subject | None:
        """Returns the subject of pace with the same kind of weights on the same shape; None if there is none."""
        found = (s for s in self.subjects if s.runtime == "pace" and s.dtype == peer.dtype and s.shape == peer.shape)
        return next(found, None)
