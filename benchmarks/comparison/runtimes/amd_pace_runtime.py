"""AMD's PACE: `LLMModel.generate` with a streamer that notes when each token comes."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.runtimes.base import Prompts, Runtime, Timing, Variant, median_step

ROOT = Path(__file__).resolve().parents[3]


class AmdPace(Runtime):
    name = "amd-pace"
    packages = ("amd-pace",)
    modules = ("torch", "transformers", "pace.llm")
    variants = (Variant("bf16", "bf16", 16, 16),)

    @classmethod
    def import_modules(cls) -> None:
        """Its module is called `pace`, like ours. So this tree leaves the path before it is imported."""
        importlib.metadata.version(cls.packages[0])
        os.environ |= {"PACE_PREFIX_CACHE": "0", "PACE_LOG_LEVEL": "error"}
        sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]
        super().import_modules()

    @classmethod
    def refusal(cls, variant: str) -> str | None:
        flags = Path("/proc/cpuinfo").read_text().split()
        return None if "avx512_bf16" in flags else "this CPU has no AVX512_BF16"

    @classmethod
    def conversion(cls, variant: str) -> None:
        return None

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        import torch

        from pace.llm import KVCacheType, LLMModel

        torch.set_num_threads(threads)
        self.model = LLMModel(str(source), dtype=torch.bfloat16, kv_cache_type=KVCacheType.SLAB_POOL, disable_tqdm=True)

    def settings(self) -> dict[str, str]:
        import torch

        return {"torch": torch.__version__, "operators": "its defaults", "cache": "SLAB_POOL"}

    def run(self, prompts: Prompts, generated: int) -> Timing:
        arrivals = Arrivals()
        began = time.perf_counter()
        self._generate(prompts, generated + 1, arrivals)
        _, *times = arrivals.times
        if len(times) != generated + 1:
            raise RuntimeError(f"AMD PACE was asked for {generated + 1} tokens and made {len(times)}")
        return Timing(times[0] - began, median_step([after - before for before, after in zip(times, times[1:])]))

    def logits(self, prompt: list[int]) -> np.ndarray:
        found = []
        hook = self.model.generator.model.register_forward_hook(lambda model, given, made: found.append(made.logits))
        self._generate([prompt], 1, Arrivals())
        hook.remove()
        return found[0][0, -1].float().numpy()

    def _generate(self, prompts: Prompts, generated: int, streamer: Any) -> None:
        import torch
        from transformers import BatchEncoding

        from pace.llm import SamplingConfig

        ids = torch.tensor(prompts)
        config = SamplingConfig(max_new_tokens=generated, min_new_tokens=generated, ignore_eos=True, do_sample=False)
        self.model.generate(BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}), config, streamer)


class Arrivals:
    """A streamer: it is given the prompts, and then a token of each sequence after every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
