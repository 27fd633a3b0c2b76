"""transformers on eager torch, with its default (growing) cache and torch's scaled dot product attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.comparison.runtimes.base import Prompts, SteppedRuntime, Variant


class Transformers(SteppedRuntime):
    name = "transformers"
    packages = ("transformers", "torch")
    modules = (
        "torch",
        "transformers",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
    )
    variants = (
        Variant("bf16", "bf16", 16, 16),
        Variant("fp32", "fp32", 32, 32),
    )  # fp16 on eager torch takes minutes for a prompt

    @classmethod
    def conversion(cls, variant: str) -> None:
        return None

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[variant]
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa").eval()

    def settings(self) -> dict[str, str]:
        import torch

        return {
            "attention": "sdpa",
            "cache": "DynamicCache",
            "torch CPU capability": torch.backends.cpu.get_cpu_capability(),
        }

    def start(self, prompts: Prompts) -> None:
        import torch

        self.past = None
        self._forward(torch.tensor(prompts))

    def step(self) -> None:
        self._forward(self.tokens)

    def _forward(self, ids) -> None:
        import torch

        with torch.inference_mode():
            output = self.model(input_ids=ids, past_key_values=self.past, use_cache=True, logits_to_keep=1)
            self.past, self.tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)

    def logits(self, prompt: list[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].float().numpy()
