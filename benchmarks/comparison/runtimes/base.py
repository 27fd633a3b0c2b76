"""The interface of a runtime for `compare`."""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

Prompts = list[list[int]]
GGUF_FILES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q2_0", "q1_0", "mxfp4")
"""Types of files quantised by llama.cpp, as kinds of weights."""
WARM_UP_STEPS = 2
"""Steps after a prompt that are not counted."""
WARM_UP_TOKENS = 64
"""Tokens of each prompt to warm up with, before the first run of its kind."""


@dataclass(frozen=True)
class Variant:
    """A runtime with weights of one kind."""

    name: str
    """Name of the kind in the runtime."""
    dtype: str
    """Kind of weights, which variants are compared by: bf16, fp16, fp32, int8, int4, or a type of GGUF file. The file
    types are those of GGUF_FILES (mxfp4 has experts in mxfp4, the rest in q8_0). All runtimes that read such files
    share the file."""
    weight_bits: float | None
    """Bits per weight, including scales. None if matrices differ; then `step_weight_bytes` returns the bytes, if they
    are known."""
    kv_bits: int = 16


@dataclass(frozen=True)
class Timing:
    """Seconds of one run."""

    prefill_s: float
    """Seconds from the prompts to the first token of each."""
    step_s: float
    """Median seconds of a decode step in which every sequence gets a token."""


class Runtime(ABC):
    """A loaded runtime, in a separate process. Class methods are called before anything is loaded.

    All prompts of a run have the same length, and decoding is greedy."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """Python distributions; the first is the runtime itself."""
    modules: ClassVar[tuple[str, ...]]
    """Modules imported by `import_modules`, so that importing does not count as loading."""
    variants: ClassVar[tuple[Variant, ...]]
    is_program: ClassVar[bool] = False
    """True for a program that loads the model in every run. It reports neither loading time nor logits."""

    @classmethod
    def import_modules(cls) -> None:
        """Imports the runtime. Raises ImportError if it is missing, or what its library raises if it cannot run
        here."""
        for name in cls.modules:
            importlib.import_module(name)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in cls.packages}

    @classmethod
    def refusal(cls, variant: str) -> str | None:
        """Returns why this machine or build does not support `variant`; None if it does. Called after
        `import_modules`."""
        return None

    @classmethod
    def takes_batches(cls) -> bool:
        """True if it can run more than one sequence."""
        return True

    @classmethod
    def conversion(cls, variant: str) -> tuple[str, str] | None:
        """Returns the runtime and variant whose conversion this one loads; None for the original checkpoint."""
        return cls.name, variant

    @classmethod
    def convert(cls, checkpoint: Path, variant: str, target: Path) -> None:
        """Converts the checkpoint to the runtime's format, as the file or directory `target`."""

    @abstractmethod
    def __init__(self, source: Path, variant: str, threads: int) -> None:
        """Loads the output of `convert`, or the checkpoint."""

    @abstractmethod
    def run(self, prompts: Prompts, generated: int) -> Timing:
        """Processes `prompts` from an empty cache, and generates `generated` tokens after the first of each."""

    @abstractmethod
    def logits(self, prompt: list[int]) -> np.ndarray:
        """Returns the logits after the last token of one prompt: `[V]`, fp32."""

    def settings(self) -> dict[str, str]:
        """Settings chosen for this runtime."""
        return {}

    def step_weight_bytes(self) -> int | None:
        """Weight bytes that a decode step reads, if the runtime reports them and `Variant.weight_bits` is not
        enough."""
        return None

    def peak_mib(self) -> float:
        """Peak resident memory of the runs."""
        return memory_mib("VmHWM")

    def tune(self, prompts: Prompts) -> None:
        """Chooses the fastest settings for runs like `prompts`; also warms up."""
        self.run([ids[:WARM_UP_TOKENS] for ids in prompts], WARM_UP_STEPS)


class SteppedRuntime(Runtime):
    """A runtime that computes one step at a time."""

    def reserve(self, batch: int, length: int) -> None:
        """Prepares a run of `batch` sequences of at most `length` tokens; not timed."""

    @abstractmethod
    def start(self, prompts: Prompts) -> None:
        """Clears the cache, processes `prompts` and chooses the first token of each."""

    @abstractmethod
    def step(self) -> None:
        """Processes the last chosen token of each sequence, and chooses the next."""

    def run(self, prompts: Prompts, generated: int) -> Timing:
        self.reserve(len(prompts), len(prompts[0]) + generated + 1)
        began = time.perf_counter()
        self.start(prompts)
        prefill = time.perf_counter() - began
        steps = []
        for _ in range(generated):
            began = time.perf_counter()
            self.step()
            steps.append(time.perf_counter() - began)
        return Timing(prefill, median_step(steps))


def memory_mib(field: str) -> float:
    """A field of this process's status, such as VmRSS, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def median_step(steps: list[float]) -> float:
    """Median without the first few steps, which find cold caches."""
    return statistics.median(steps[WARM_UP_STEPS:] or steps)
