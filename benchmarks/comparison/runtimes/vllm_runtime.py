"""vLLM for CPUs: its engine in this process, one step of its scheduler at a time, given token ids."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.runtimes.base import Prompts, SteppedRuntime, Variant

CACHE_GIB = 4
"""Its default."""
MAX_LENGTH = 1 << 15
"""Limit of a sequence's length: the cache must hold one of the model's own limit, which may be 128k tokens."""
BATCHED_TOKENS = 4096
"""Tokens of prompts processed at once: all of a scenario's. A prompt that waits would let others decode meanwhile."""


ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables of its processes. It finds its platform by the device: the package vllm-cpu does not have the name that it
looks for."""


class Vllm(SteppedRuntime):
    name = "vllm"
    packages = ("vllm-cpu",)
    modules = ("vllm", "vllm.v1.engine.llm_engine")
    variants = (
        Variant("bfloat16", "bf16", 16, 16),
        Variant("float16", "fp16", 16, 16),
        Variant("float32", "fp32", 32, 32),
    )

    @classmethod
    def import_modules(cls) -> None:
        """The engine runs in this process, so that its memory and its steps are measured."""
        os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        super().import_modules()

    @classmethod
    def conversion(cls, variant: str) -> None:
        return None

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        import torch
        from vllm import EngineArgs, LLMEngine

        torch.set_num_threads(threads)
        longest = json.loads((source / "config.json").read_text()).get("max_position_embeddings", MAX_LENGTH)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(source),
                dtype=variant,
                skip_tokenizer_init=True,
                max_model_len=min(longest, MAX_LENGTH),
                max_num_batched_tokens=BATCHED_TOKENS,
                enable_prefix_caching=False,
                max_logprobs=-1,
                logprobs_mode="raw_logits",
            )
        )
        self.numbers, self.requests = itertools.count(), set()

    def settings(self) -> dict[str, str]:
        import torch

        return {
            "torch": torch.__version__,
            "torch CPU capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "max_num_batched_tokens": str(BATCHED_TOKENS),
        }

    def reserve(self, batch: int, length: int) -> None:
        self.engine.abort_request(list(self.requests))
        self.requests, self.length = set(), length

    def start(self, prompts: Prompts) -> None:
        self._submit(prompts, max_tokens=self.length)
        waiting = set(self.requests)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step() if output.outputs[0].token_ids}

    def step(self) -> None:
        self.engine.step()

    def logits(self, prompt: list[int]) -> np.ndarray:
        self.reserve(1, len(prompt) + 1)
        self._submit([prompt], max_tokens=1, logprobs=-1)
        outputs: list[Any] = []
        while not outputs:
            outputs = self.engine.step()
        [found] = outputs[0].outputs[0].logprobs
        self.requests.clear()
        return np.array([found[token].logprob for token in range(len(found))], np.float32)

    def _submit(self, prompts: Prompts, **limits: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **limits)
        for ids in prompts:
            name = str(next(self.numbers))
            self.engine.add_request(name, {"prompt_token_ids": ids}, params)
            self.requests.add(name)
