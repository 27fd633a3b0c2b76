"""Schedules the runs. Each runtime has a separate process, and those that fit in memory together take turns. The limits
of the machine are measured around every run."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.comparison.checkpoint import ensure_checkpoint, shape_config
from benchmarks.comparison.results import Results, Run, Scenario, Subject
from benchmarks.comparison.runtimes import RUNTIMES
from benchmarks.comparison.runtimes.base import GGUF_FILES
from benchmarks.comparison.worker import MACHINE, Worker, WorkerError
from pace.bench.costs import Costs
from pace.bench.limits import Limits, between
from pace.llm.models.model_list import read_config
from pace.memory import available_memory_bytes
from pace.ops import reference

SubjectKey = tuple[str, str, str]
AGREEMENT_TOKENS = 64
"""Tokens of the prompt after which the logits of all runtimes are compared."""
NOMINAL_BITS = {
    "bf16": 16,
    "fp16": 16,
    "fp32": 32,
    "int8": 9,
    "int4": 6,
    "q8_0": 9,
    "q6_k": 7,
    "q5_k_m": 6,
    "q4_k_m": 6,
    "q4_0": 5,
    "q2_0": 3,
    "q1_0": 2,
    "mxfp4": 5,
}
"""Bits of a weight, for planning memory."""
RESIDENT_FACTOR, RESIDENT_BYTES = 1.4, 600 << 20
"""Memory of a process: its weights times the factor (repacked, or in a file cache), plus the bytes."""
MEMORY_SHARE = 0.85
STEADY, MORE_TRIES = 0.15, 2
"""A round in which the machine's limits change by more than STEADY is measured again, at most MORE_TRIES times."""
SETTLE_SECONDS = 0.3
"""Pause after a run. Threads of OpenMP and ONNX Runtime spin for a tenth of a second before they sleep. Without the
pause they would disturb the limits or the next run."""

PEER_ISA = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "CT2_FORCE_CPU_ISA": "AVX2",
    }
}
"""Environment variables of torch, oneDNN (also OpenVINO's), MKL and CTranslate2. ONNX Runtime has none; llama.cpp's
instruction set is chosen at build time."""


class LimitsError(RuntimeError):
    """Raised if the limits cannot be measured. It ends the comparison, because no runtime is at fault."""


@dataclass
class Plan:
    """Plan of a comparison."""

    shapes: list[str]
    runtimes: list[str]
    dtypes: list[str]
    scenarios: list[Scenario]
    """The first is the main one; its runs predict how long the others would take."""
    other_dtypes: list[str]
    """Kinds of weights that also run the other scenarios."""
    repeats: int
    other_repeats: int
    threads: int | None
    isa: str | None
    """Instruction set of pace; None for its own choice."""
    peers_isa: str | None
    """A key of `PEER_ISA`; None lets each peer choose."""
    folder: Path
    """Directory of checkpoints and their conversions."""
    patience_s: float
    """A run that would take longer is skipped and reported."""
    pythons: dict[str, str] = field(default_factory=dict)
    """Interpreters of runtimes that need a separate environment."""
    prepare_only: bool = False
    """Only write checkpoints and conversions."""
    say: Callable[[str], None] = print


class Comparison:
    """Fills `results` in the order of the plan. A failure is recorded as `missing` of its subject, and the others
    continue."""

    def __init__(self, plan: Plan, results: Results) -> None:
        self.plan, self.results, self.group = plan, results, 0
        plan.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        with self._worker(MACHINE) as machine:
            self.machine = machine
            self.results.machine = _machine() | machine.ask("machine", threads=self.plan.threads)
            self.results.machine |= {"is_forced": self.plan.isa is not None, "peers_isa": self.plan.peers_isa}
            self.threads = self.results.machine["threads"]
            available = {runtime: self._describe(runtime) for runtime in self.plan.runtimes}
            for shape in self.plan.shapes:
                sources = self._prepare(shape, available)
                if not self.plan.prepare_only:
                    self._shape(shape, sources)

    def _describe(self, runtime: str) -> dict:
        """Returns the worker's description of a runtime, or why it cannot run."""
        try:
            with self._worker(runtime) as worker:
                answer = worker.ask("describe")
        except (WorkerError, OSError) as error:
            self.plan.say(f"{runtime} is missing: {error}")
            return {"missing": str(error)}
        self.results.versions |= answer["versions"]
        return answer

    def _prepare(self, shape: str, available: dict[str, dict]) -> dict[SubjectKey, Path]:
        """Returns the path that each subject of a shape loads; missing subjects have none."""
        folder = self.plan.folder / shape
        self.plan.say(f"\n{shape}: checkpoint and conversions in {folder}")
        checkpoint = ensure_checkpoint(shape, folder)
        model_class, config = read_config(shape_config(shape))
        self.costs = Costs.of(model_class(config, torch.float32, reference), torch.float32)
        self.vocab_size = config.vocab_size
        self.results.parameters[shape] = self.costs.weight_bytes // 4
        subjects = []
        for name in self.plan.runtimes:
            for variant in RUNTIMES[name].variants:
                if variant.dtype in self.plan.dtypes:
                    about = available[name]
                    missing = about.get("missing") or about["refusals"][variant.name]
                    subjects.append(Subject(shape, name, variant.name, variant.dtype, missing, about.get("import_s")))
        self.results.subjects += subjects
        sources = {}
        for subject in subjects:
            if not subject.missing:
                with self._noting_failure(subject):
                    sources[subject.key] = self._source(subject, checkpoint, folder)
        return sources

    def _shape(self, shape: str, sources: dict[SubjectKey, Path]) -> None:
        subjects = [subject for subject in self.results.subjects if subject.shape == shape]
        for dtype, group in self._groups([subject for subject in subjects if not subject.missing]):
            self._group(dtype, group, sources)
        self._compare_logits(subjects)

    def _source(self, subject: Subject, checkpoint: Path, folder: Path) -> Path:
        """Returns the path that the runtime loads; its converter writes it the first time."""
        source = RUNTIMES[subject.runtime].conversion(subject.variant)
        return (
            ensure_conversion(*source, checkpoint, folder, self.plan.pythons, self.plan.say) if source else checkpoint
        )

    def _groups(self, subjects: list[Subject]) -> Iterator[tuple[str, list[Subject]]]:
        """Yields a kind of weights and subjects to load together: pace and peers of this kind, up to the available
        memory.

        If pace has no weights of a kind, its bf16 ones run with the peers."""
        budget = MEMORY_SHARE * available_memory_bytes()
        for dtype in dict.fromkeys(subject.dtype for subject in subjects):
            of_pace = [subject for subject in subjects if subject.runtime == "pace"]
            ours = [s for s in of_pace if s.dtype == dtype] or [s for s in of_pace if s.dtype == "bf16"]
            waiting = [subject for subject in subjects if subject.dtype == dtype and subject not in ours]
            while True:
                group, left = list(ours), budget - sum(map(self._resident_bytes, ours))
                while waiting and (self._resident_bytes(waiting[0]) <= left or len(group) == len(ours)):
                    left -= self._resident_bytes(waiting[0])
                    group.append(waiting.pop(0))
                if group:
                    yield dtype, group
                if not waiting:
                    break

    def _resident_bytes(self, subject: Subject) -> float:
        weights = self.costs.weight_bytes / 32 * NOMINAL_BITS[subject.dtype]
        return weights * RESIDENT_FACTOR + RESIDENT_BYTES

    def _group(self, dtype: str, subjects: list[Subject], sources: dict[SubjectKey, Path]) -> None:
        self.group += 1
        main, *others = self.plan.scenarios
        with ExitStack() as stack:
            workers: dict[int, Worker] = {}
            for subject in subjects:
                with self._noting_failure(subject):
                    worker = stack.enter_context(self._worker(subject.runtime))
                    answer = worker.ask(
                        "load", source=str(sources[subject.key]), variant=subject.variant, threads=self.threads
                    )
                    subject.load_s = answer["load_s"]
                    subject.weight_bytes = answer["step_weight_bytes"] or self._nominal_weight_bytes(subject)
                    workers[id(subject)] = worker
            for scenario in [main, *(others if dtype in self.plan.other_dtypes else [])]:
                running = [s for s in subjects if not s.missing and self._is_worth_waiting(s, scenario)]
                for subject in running:
                    with self._noting_failure(subject):
                        workers[id(subject)].ask("tune", prompts=self._prompts(scenario, seed=0))
                for index in range(self.plan.repeats if scenario == main else self.plan.other_repeats):
                    self._round(running, workers, scenario, index)
                if scenario == main:
                    for subject in running:
                        with self._noting_failure(subject):
                            subject.peak_mib = workers[id(subject)].ask("status")["peak_mib"]
            for subject in subjects:
                if not subject.missing:
                    with self._noting_failure(subject):
                        if not RUNTIMES[subject.runtime].is_program:
                            workers[id(subject)].ask(
                                "logits",
                                prompt=self._prompts(Scenario(AGREEMENT_TOKENS, 1), seed=0)[0],
                                path=str(self._logits(subject)),
                            )
                        subject.settings = workers[id(subject)].ask("status")["settings"]

    def _round(self, subjects: list[Subject], workers: dict[int, Worker], scenario: Scenario, index: int) -> None:
        """Runs each subject in turn. Of several tries, keeps the one in which the limits changed least."""
        tries: list[tuple[float, list[Run]]] = []
        while not tries or (tries[-1][0] > STEADY and len(tries) <= MORE_TRIES):
            limits: list[Limits] = []
            runs: list[Run] = []
            prompts = self._prompts(scenario, seed=1 + index + 1000 * len(tries))
            for subject in subjects:
                if not subject.missing:
                    with self._noting_failure(subject):
                        runs.append(self._measure(subject, workers, scenario, prompts, index, limits))
            tries.append((change_of(limits), runs))
            if tries[-1][0] > STEADY:
                self.plan.say(f"  the limits changed by {tries[-1][0]:.0%} in this round")
        change, runs = min(tries, key=lambda one: one[0])
        self.results.runs += runs
        self.results.rounds += 1
        self.results.rounds_again += len(tries) - 1
        self.results.unsteady_rounds += change > STEADY

    def _measure(
        self,
        subject: Subject,
        workers: dict[int, Worker],
        scenario: Scenario,
        prompts: list[list[int]],
        index: int,
        seen: list[Limits],
    ) -> Run:
        """Runs a subject once. The limits before and after it are added to `seen`."""
        worker = workers[id(subject)]
        if not RUNTIMES[subject.runtime].is_program:  # the system may have taken mapped weights while others ran
            worker.ask("run", prompts=self._prompts(scenario, seed=0), generated=1)
        before = self._limits()
        busy, own, began = _busy_seconds(), worker.cpu_seconds(), time.perf_counter()
        timing = worker.ask("run", prompts=prompts, generated=scenario.generate)
        elapsed = time.perf_counter() - began
        others = max(0.0, (_busy_seconds() - busy) - (worker.cpu_seconds() - own)) / elapsed
        seen += [before, self._limits()]
        limits = between(*seen[-2:])
        run = Run(
            *subject.key, self.group, index, scenario, timing["prefill_s"], timing["step_s"], *self._work(subject,
            scenario),
            limits.read_gb_s, limits.fma_gflops, others,
        )  # fmt: skip
        warning = f"   others used {others:.2f} cores" if others > 0.05 else ""
        self.plan.say(
            f"  {subject.shape:<14}{subject.label:<28}{scenario.title:<16}prefill {run.prefill_rate:8.1f}   "
            f"decode {run.decode_rate:8.1f} tokens/s   "
            f"limits {run.read_gb_s:5.1f} GB/s {run.fma_gflops:4.0f} GFLOPS{warning}"
        )
        return run

    def _limits(self) -> Limits:
        time.sleep(SETTLE_SECONDS)
        try:
            return Limits(**self.machine.ask("limits"))
        except WorkerError as error:
            raise LimitsError(f"the limits of the machine cannot be measured: {error}") from error

    def _work(self, subject: Subject, scenario: Scenario) -> tuple[int, int, int | None]:
        """Returns the operations of the prompts and of a step, and the bytes of a step, as the model requires them."""
        costs, context = self.costs, scenario.prompt + scenario.generate // 2
        num_bytes = None
        if subject.weight_bytes:
            kv_bits = next(v.kv_bits for v in RUNTIMES[subject.runtime].variants if v.name == subject.variant)
            more = costs.step_weight_bytes(scenario.batch) / costs.decode_weight_bytes  # sequences choose other experts
            cached = costs.kv_bytes(context) * kv_bits // 32 + costs.state_traffic
            num_bytes = round(subject.weight_bytes * more) + scenario.batch * cached
        return (
            scenario.batch * costs.prefill_flops(scenario.prompt),
            costs.decode_flops(scenario.batch, context),
            num_bytes,
        )

    def _nominal_weight_bytes(self, subject: Subject) -> int | None:
        bits = next(v.weight_bits for v in RUNTIMES[subject.runtime].variants if v.name == subject.variant)
        return int(self.costs.decode_weight_bytes * bits / 32) if bits else None

    def _is_worth_waiting(self, subject: Subject, scenario: Scenario) -> bool:
        main = self.plan.scenarios[0]
        if scenario.batch > 1 and not RUNTIMES[subject.runtime].takes_batches():
            return False
        if scenario == main:
            return True
        prefill, step = (
            self.results.median(subject, main, value)
            for value in (lambda run: run.prefill_rate, lambda run: run.step_s)
        )
        if prefill is None:
            return False
        seconds = scenario.batch * scenario.prompt / prefill + scenario.generate * step
        if seconds > self.plan.patience_s:
            self.results.skipped.append(
                f"{subject.shape}, {subject.label}, {scenario.title}: a run would take about {seconds:.0f} s"
            )
            self.plan.say("  skipped: " + self.results.skipped[-1])
        return seconds <= self.plan.patience_s

    def _compare_logits(self, subjects: list[Subject]) -> None:
        """Sets each subject's error of the logits against exact ones."""
        found = [subject for subject in subjects if self._logits(subject).exists()]
        for subject in found:
            if exact := _exact_beside(subject, found):
                want = np.load(self._logits(exact)).astype(np.float64)
                got = np.load(self._logits(subject)).astype(np.float64)[: len(want)]
                subject.error = float(np.sqrt(np.mean((got - want) ** 2)) / want.std())
                subject.same_argmax = bool(got.argmax() == want.argmax())
        for subject in found:
            self._logits(subject).unlink()

    def _prompts(self, scenario: Scenario, seed: int) -> list[list[int]]:
        """Returns prompts that differ between rounds, so that no runtime finds one in a cache."""
        return np.random.default_rng(seed).integers(self.vocab_size, size=(scenario.batch, scenario.prompt)).tolist()

    def _logits(self, subject: Subject) -> Path:
        return self.plan.folder / subject.shape / f"logits-{subject.runtime}-{subject.variant}.npy"

    def _worker(self, runtime: str) -> Worker:
        environment = {"OMP_NUM_THREADS": str(self.plan.threads)} if self.plan.threads else {}
        if runtime in (MACHINE, "pace") and self.plan.isa:
            environment["PACE_ISA"] = self.plan.isa
        elif runtime not in (MACHINE, "pace") and self.plan.peers_isa:
            environment |= PEER_ISA[self.plan.peers_isa]
        return Worker(
            runtime, self.plan.pythons.get(runtime, sys.executable), environment, self.plan.folder / "log.txt"
        )

    def _noting_failure(self, subject: Subject) -> _NotingFailure:
        return _NotingFailure(subject, self.plan.say)


class _NotingFailure:
    """Records a failure of one runtime, and lets the others continue."""

    def __init__(self, subject: Subject, say: Callable[[str], None]) -> None:
        self.subject, self.say = subject, say

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, (WorkerError, OSError)):
            return False
        self.subject.missing = str(error)
        self.say(f"  {self.subject.shape}, {self.subject.label} failed: {error}")
        return True


def change_of(limits: list[Limits]) -> float:
    """Relative excess of the largest over the smallest value of each limit; the larger of the two."""
    pairs = [(limit.read_gb_s, limit.fma_gflops) for limit in limits]
    return max((max(values) / min(values) - 1 for values in zip(*pairs)), default=0.0)


def _exact_beside(subject: Subject, found: list[Subject]) -> Subject | None:
    """Returns the subject whose logits another one is compared with: transformers in fp32, or else pace in fp32. A
    quantised GGUF file is compared with llama.cpp, because its weights differ from their source."""
    if subject.dtype in GGUF_FILES:
        return next((s for s in found if s.runtime == "llama.cpp" and s.dtype == subject.dtype), None)
    exact = [s for s in found if s.dtype == "fp32"]
    return min(exact, key=lambda s: (s.runtime != "transformers", s.runtime != "pace"), default=None)


def _machine() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", "").split())
    shown = [
        flag
        for flag in ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
        if flag in flags
    ]
    return {
        "cpu": (
            f"{fields.get('model name', platform.machine())} (family {fields.get('cpu family', '?')}, model "
            f"{fields.get('model', '?')})"
        ),
        "features": shown,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.release().partition("-")[0],
        "python": platform.python_version(),
    }


def _busy_seconds() -> float:
    """Busy seconds of all processors since the machine started."""
    user, nice, system, _, _, irq, soft_irq, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def ensure_conversion(
    runtime: str,
    variant: str,
    checkpoint: Path,
    folder: Path,
    pythons: dict[str, str],
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Returns `runtime`'s conversion of the checkpoint in `folder`; a separate process writes it if it is missing.
    Raises WorkerError if that fails."""
    target = folder / f"{runtime}-{variant}"
    if not target.exists():
        say(f"  converting to {target.name}")
        partial = folder / "converting"
        _remove(partial)
        with Worker(runtime, pythons.get(runtime, sys.executable), None, folder / "log.txt") as worker:
            worker.ask("convert", checkpoint=str(checkpoint), variant=variant, target=str(partial))
        partial.rename(target)
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
