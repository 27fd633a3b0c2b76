"""ONNX Runtime GenAI: its model builder and its `Generator`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.comparison.runtimes.base import Prompts, SteppedRuntime, Variant


class OnnxRuntime(SteppedRuntime):
    name = "onnxruntime-genai"
    packages = ("onnxruntime-genai", "onnxruntime")
    modules = ("onnxruntime_genai",)
    variants = (Variant("fp32", "fp32", 32, 32), Variant("int4", "int4", None, 32))

    @classmethod
    def convert(cls, checkpoint: Path, variant: str, target: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(checkpoint),
            "-o",
            str(target),
            "-p",
            variant,
        ]
        command += ["-e", "cpu", "-c", str(target.with_name("cache"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"its model builder failed: {done.stderr.strip().splitlines()[-1]}")

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        import onnxruntime_genai

        config = json.loads((source / "genai_config.json").read_text())
        config["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = threads
        (source / "genai_config.json").write_text(json.dumps(config, indent=1))
        self.genai, self.model = onnxruntime_genai, onnxruntime_genai.Model(str(source))

    def reserve(self, batch: int, length: int) -> None:
        self.generator = None  # frees the previous run's cache first
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(max_length=length, min_length=length, batch_size=batch, do_sample=False)
        self.generator = self.genai.Generator(self.model, params)

    def start(self, prompts: Prompts) -> None:
        self.generator.append_tokens(np.array(prompts, np.int32))
        self.generator.generate_next_token()

    def step(self) -> None:
        self.generator.generate_next_token()

    def logits(self, prompt: list[int]) -> np.ndarray:
        self.reserve(1, len(prompt) + 1)
        self.generator.append_tokens(np.array([prompt], np.int32))
        return self.generator.get_logits().reshape(-1, self.generator.get_logits().shape[-1])[-1]
