"""ik_llama.cpp through its own `llama-bench`, a program that loads a file, times it and ends.

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
SETTINGS = {"-rtr": "repack", "-fa": "flash attention"}
"""Flags of 0 or 1; all combinations are tried."""


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
            raise ImportError(f"{Path(program).name} is no program that can be run")

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}

    @classmethod
    def conversion(cls, variant: str) -> tuple[str, str]:
        return "llama.cpp", variant.lower()

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        self.source, self.threads = source, threads
        self.chosen = dict.fromkeys(SETTINGS, 1)
        self.build = ""

    def run(self, prompts: Prompts, generated: int) -> Timing:
        return self._bench(len(prompts[0]), generated, self.chosen)

    def tune(self, prompts: Prompts) -> None:
        """Chooses repacking and flash attention by the shortest time for the prompt and 64 steps."""
        seconds = {}
        for values in itertools.product((0, 1), repeat=len(SETTINGS)):
            timing = self._bench(len(prompts[0]), 8, dict(zip(SETTINGS, values)))
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

    def _bench(self, prompt: int, generated: int, flags: dict[str, int]) -> Timing:
        """Times one prompt of random tokens, and steps after it. Each is a separate test of llama-bench, after a
        warm-up."""
        command = [os.environ[PROGRAM_VARIABLE], "-m", str(self.source), "-o", "json", "-r", "1"]
        command += ["-t", str(self.threads), "-p", str(prompt), "-n", "0", "-gp", f"{prompt},{generated}"]
        command += [word for flag, value in flags.items() for word in (flag, str(value))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"llama-bench ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
        return self._read(done.stdout, generated)

    def _read(self, answer: str, generated: int) -> Timing:
        tests = json.loads(answer)
        prefill = next(test for test in tests if not test["n_gen"])
        decode = next(test for test in tests if test["n_gen"])
        self.build = f"{decode['build_commit']} ({decode['build_number']})"
        return Timing(prefill["avg_ns"] / 1e9, decode["avg_ns"] / 1e9 / generated)
