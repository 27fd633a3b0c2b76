"""CTranslate2: its own converter and `Generator.generate_batch`, which calls back for each token."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.comparison.runtimes.base import Prompts, Runtime, Timing, Variant, median_step


class CTranslate2(Runtime):
    name = "ctranslate2"
    packages = ("ctranslate2",)
    modules = ("ctranslate2",)
    variants = (Variant("float32", "fp32", 32, 32), Variant("int8_float32", "int8", 8, 32))

    @classmethod
    def refusal(cls, variant: str) -> str | None:
        import ctranslate2

        supported = ctranslate2.get_supported_compute_types("cpu")
        return None if variant in supported else f"its compute types on this CPU are {', '.join(sorted(supported))}"

    @classmethod
    def convert(cls, checkpoint: Path, variant: str, target: Path) -> None:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(checkpoint)).convert(str(target), quantization=variant)

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        import ctranslate2

        self.generator = ctranslate2.Generator(
            str(source), "cpu", compute_type=variant, inter_threads=1, intra_threads=threads
        )

    def run(self, prompts: Prompts, generated: int) -> Timing:
        arrived: dict[int, float] = {}

        def note(result) -> bool:
            arrived.setdefault(result.step, time.perf_counter())
            return False

        began = time.perf_counter()
        self.generator.generate_batch(
            _words(prompts),
            beam_size=1,
            sampling_topk=1,
            min_length=generated + 1,
            max_length=generated + 1,
            include_prompt_in_result=False,
            callback=note,
        )
        times = [arrived[step] for step in sorted(arrived)]
        if len(times) != generated + 1:
            raise RuntimeError(f"CTranslate2 was asked for {generated + 1} tokens and made {len(times)}")
        return Timing(times[0] - began, median_step([after - before for before, after in zip(times, times[1:])]))

    def logits(self, prompt: list[int]) -> np.ndarray:
        return np.array(self.generator.forward_batch(_words([prompt])))[0, -1]


def _words(prompts: Prompts) -> list[list[str]]:
    """Converts token ids to text, as CTranslate2 requires: see `checkpoint._write_tokenizer`."""
    return [[f"t{token}" for token in ids] for ids in prompts]
