"""ik_llama.cpp through its own `llama-bench`, a program that loads a file, times it and ends. Batches are timed by
`llama-batched-bench`, if it is next to it.

It reads the files of llama.cpp's quantiser. `-rtr 1` repacks them at load into its interleaved types, its fastest. It
reports the mean of the decode steps; for other runtimes it is the median."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
from pathlib import Path

import numpy as np

from benchmarks.comparison.runtimes.base import GGUF_FILES, Prompts, Runtime, Timing, Variant

PROGRAM_VARIABLE = "LLAMA_BENCH"
"""Environment variable with the path of the program."""
BATCHED_PROGRAM = "llama-batched-bench"
SETTINGS = {"-rtr": "repack", "-fa": "flash attention"}
"""Flags of 0 or 1; all combinations are tried."""
UNKNOWN = ("Q2_0",)
"""Types of llama.cpp's files that it does not read."""


class IkLlamaCpp(Runtime):
    name = "ik_llama.cpp"
    packages = ()
    modules = ("gguf",)
    is_program = True
    variants = (
        Variant("bf16", "bf16", 16),
        Variant("f16", "fp16", 16),
        Variant("q8_0", "int8", None),
        Variant("q4_0", "int4", None),
        *(Variant(file.upper(), file, None) for file in GGUF_FILES),
    )

    @classmethod
    def import_modules(cls) -> None:
        super().import_modules()
        program = os.environ.get(PROGRAM_VARIABLE)
        if not program:
            raise ImportError("its llama-bench has no path: --llama-bench PATH")
        if not os.access(program, os.X_OK):
            raise ImportError(f"{Path(program).name} is not a program that can be run")

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}

    @classmethod
    def refusal(cls, variant: str) -> str | None:
        return "it has no weights of this type" if variant in UNKNOWN else None

    @classmethod
    def takes_batches(cls) -> bool:
        return os.access(_batched_program(), os.X_OK)

    @classmethod
    def conversion(cls, variant: str) -> tuple[str, str]:
        return "llama.cpp", variant.lower()

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        self.source, self.threads = source, threads
        self.chosen = dict.fromkeys(SETTINGS, 1)
        self.build = ""

    def run(self, prompts: Prompts, generated: int) -> Timing:
        return self._bench(prompts, generated, self.chosen)

    def tune(self, prompts: Prompts) -> None:
        """Chooses repacking and flash attention by the shortest time for the prompt and 64 steps."""
        seconds = {}
        for values in itertools.product((0, 1), repeat=len(SETTINGS)):
            timing = self._bench(prompts, 8, dict(zip(SETTINGS, values)))
            seconds[values] = timing.prefill_s + 64 * timing.step_s
        self.chosen = dict(zip(SETTINGS, min(seconds, key=seconds.__getitem__)))

    def settings(self) -> dict[str, str]:
        return {SETTINGS[flag]: str(value) for flag, value in self.chosen.items()} | {"build": self.build}

    def step_weight_bytes(self) -> int | None:
        from benchmarks.comparison.runtimes.llama_cpp_runtime import gguf_step_bytes

        return gguf_step_bytes(self.source)

    def peak_mib(self) -> float:
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024

    def logits(self, prompt: list[int]) -> np.ndarray:
        raise NotImplementedError("llama-bench shows no logits")

    def _bench(self, prompts: Prompts, generated: int, flags: dict[str, int]) -> Timing:
        if len(prompts) > 1:
            return self._bench_batch(len(prompts), len(prompts[0]), generated, flags)
        return self._bench_sequence(len(prompts[0]), generated, flags)

    def _bench_sequence(self, prompt: int, generated: int, flags: dict[str, int]) -> Timing:
        """Times one prompt of random tokens, and steps after it. Each is a separate test of llama-bench, after a
        warm-up."""
        command = [os.environ[PROGRAM_VARIABLE], "-m", str(self.source), "-o", "json", "-r", "1"]
        command += ["-t", str(self.threads), "-p", str(prompt), "-n", "0", "-gp", f"{prompt},{generated}"]
        command += [word for flag, value in flags.items() for word in (flag, str(value))]
        tests = json.loads(_run(command).stdout)
        prefill = next(test for test in tests if not test["n_gen"])
        decode = next(test for test in tests if test["n_gen"])
        self.build = f"{decode['build_commit']} ({decode['build_number']})"
        return Timing(prefill["avg_ns"] / 1e9, decode["avg_ns"] / 1e9 / generated)

    def _bench_batch(self, batch: int, prompt: int, generated: int, flags: dict[str, int]) -> Timing:
        """Times prompts of equal tokens, and steps after them. Only the last prompt gets logits."""
        command = [_batched_program(), "-m", str(self.source), "-t", str(self.threads)]
        command += ["-c", str(batch * (prompt + generated)), "-npp", str(prompt), "-ntg", str(generated)]
        command += ["-npl", str(batch), "-fa", str(flags["-fa"]), *["-rtr"] * flags["-rtr"]]
        rows = [line.split("|") for line in _run(command).stderr.splitlines() if line.startswith("|")]
        row = dict(zip((name.strip() for name in rows[0]), rows[-1]))
        return Timing(float(row["T_PP s"]), float(row["T_TG s"]) / generated)


def _batched_program() -> str:
    return str(Path(os.environ.get(PROGRAM_VARIABLE, "")).with_name(BATCHED_PROGRAM))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end. Raises RuntimeError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        name = Path(command[0]).name
        raise RuntimeError(f"{name} ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
    return done
