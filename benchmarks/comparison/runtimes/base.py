"""What `compare` asks of a runtime."""

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
GGUF_FILES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "mxfp4")
"""Types of files that llama.cpp quantises, as kinds of weights."""
WARM_UP_STEPS = 2
"""Steps after a prompt that are not counted."""
WARM_UP_TOKENS = 64
"""Of each prompt, before the first run of its kind."""


@dataclass(frozen=True)
class Variant:
    """A runtime with weights of one kind."""

    name: str
    """As the runtime calls it."""
    dtype: str
    """What it is compared with: bf16, fp16, fp32, int8 or int4, or a GGUF file of a type, which all that read such
    files read: q8_0, q6_k, q5_k_m, q4_k_m, mxfp4 (of experts; the rest is q8_0)."""
    weight_bits: float | None
    """Per weight, scales included; None: not the same for all matrices, `step_weight_bytes` tells or nobody knows."""
    kv_bits: int = 16


@dataclass(frozen=True)
class Timing:
    """Seconds of one run."""

    prefill_s: float
    """From the prompts to the first token of each of them."""
    step_s: float
    """Of a decode step in which every sequence gets a token: the median of the run."""


class Runtime(ABC):
    """One runtime, loaded, in a process of its own. Classes are asked before anything is loaded, objects run.

    All prompts of a run have the same length, and each token is the most likely one."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    """Python distributions, the first of which is the runtime itself."""
    modules: ClassVar[tuple[str, ...]]
    """Imported by `import_modules`, so that importing is not counted as loading."""
    variants: ClassVar[tuple[Variant, ...]]
    is_program: ClassVar[bool] = False
    """True of a program that loads at every run: it takes one prompt, tells no time of loading and shows no logits."""

    @classmethod
    def import_modules(cls) -> None:
        """Raises ImportError where the runtime is missing, or what else its library raises where it cannot run here."""
        for name in cls.modules:
            importlib.import_module(name)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in cls.packages}

    @classmethod
    def refusal(cls, variant: str) -> str | None:
        """Why this machine or build has not got `variant`; None where it has. Called after `import_modules`."""
        return None

    @classmethod
    def conversion(cls, variant: str) -> tuple[str, str] | None:
        """The runtime, and the variant of it, whose conversion this one runs from; None for the checkpoint as it is."""
        return cls.name, variant

    @classmethod
    def convert(cls, checkpoint: Path, variant: str, target: Path) -> None:
        """Writes the checkpoint in the runtime's own format: the file or directory `target`."""

    @abstractmethod
    def __init__(self, source: Path, variant: str, threads: int) -> None:
        """Loads what `convert` wrote (or the checkpoint)."""

    @abstractmethod
    def run(self, prompts: Prompts, generated: int) -> Timing:
        """Computes `prompts` from an empty cache, and `generated` tokens after the first of each."""

    @abstractmethod
    def logits(self, prompt: list[int]) -> np.ndarray:
        """`[V]`, fp32: after the last token of one prompt."""

    def settings(self) -> dict[str, str]:
        """What was chosen for this runtime where it leaves a choice."""
        return {}

    def step_weight_bytes(self) -> int | None:
        """Bytes of weights that a decode step reads, where the runtime tells and `Variant.weight_bits` does not."""
        return None

    def peak_mib(self) -> float:
        """Peak resident memory of what has run."""
        return memory_mib("VmHWM")

    def tune(self, prompts: Prompts) -> None:
        """Chooses the fastest settings for runs like `prompts`; also the warm-up."""
        self.run([ids[:WARM_UP_TOKENS] for ids in prompts], WARM_UP_STEPS)


class SteppedRuntime(Runtime):
    """A runtime that can be asked for one step at a time."""

    def reserve(self, batch: int, length: int) -> None:
        """Called before a run of `batch` sequences of at most `length` tokens, outside of the clock."""

    @abstractmethod
    def start(self, prompts: Prompts) -> None:
        """Forgets what was, computes `prompts` and chooses the first token of each."""

    @abstractmethod
    def step(self) -> None:
        """Computes the token chosen last of each sequence, and chooses the next."""

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
    """A field of this process's status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def median_step(steps: list[float]) -> float:
    """Without the first few, which find cold caches."""
    return statistics.median(steps[WARM_UP_STEPS:] or steps)
