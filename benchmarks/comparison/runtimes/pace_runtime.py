"""pace: its engine with greedy decoding, as in `pace bench`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.comparison.runtimes.base import GGUF_FILES, Prompts, SteppedRuntime, Variant

CACHE_BYTES = 2 << 30
FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
QUANTIZATION = {"int4": {"format": "int4", "group": 32}}
"""Options that differ from the defaults of a format: the group size of the peers' 4 bits."""


class Pace(SteppedRuntime):
    name = "pace"
    packages = ("torch",)
    modules = ("pace.llm.loading.load", "pace.llm.engine.engine", "pace.llm.clients.session")
    variants = (
        Variant("bf16", "bf16", 16, 16),
        Variant("fp16", "fp16", 16, 16),
        Variant("fp32", "fp32", 32, 32),
        Variant("int8", "int8", None, 16),
        Variant("int4", "int4", None, 16),
        *(Variant(file.upper(), file, None, 16) for file in GGUF_FILES),
    )

    @classmethod
    def conversion(cls, variant: str) -> tuple[str, str] | None:
        return ("llama.cpp", variant.lower()) if variant.lower() in GGUF_FILES else None

    @classmethod
    def versions(cls) -> dict[str, str]:
        import pace

        return {"pace": pace.__version__, **super().versions()}

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        """`variant`: one of those above, or any other format of `pace.quant`."""
        from pace.llm.engine.engine import Engine
        from pace.llm.loading.load import load_model
        from pace.llm.loading.options import LoadOptions, select_ops
        from pace.llm.runners import make_runner

        as_it_is = variant in FLOATS or variant.lower() in GGUF_FILES
        quantization = None if as_it_is else QUANTIZATION.get(variant, variant)
        model = load_model(
            LoadOptions(
                str(source),
                dtype=FLOATS.get(variant, "bfloat16"),
                num_threads=threads,
                progress=False,
                quantization=quantization,
            )
        )
        self.engine = Engine.create(make_runner(model, "native"), select_ops("native"), CACHE_BYTES)
        self.model, self.sequences = model, []

    def settings(self) -> dict[str, str]:
        from pace import _C

        return {"instruction set": _C.isa(), "threads": str(_C.get_num_threads())}

    def step_weight_bytes(self) -> int | None:
        from pace.bench.costs import Costs

        return Costs.of(self.model, self.model.dtype).decode_weight_bytes

    def reserve(self, batch: int, length: int) -> None:
        self.engine.abort(self.sequences)
        self.sequences, self.length = [], length

    def start(self, prompts: Prompts) -> None:
        from pace.llm.sampling.sampler import Sampling
        from pace.llm.sequence import Sequence
        from pace.llm.text.stopping_criteria import StoppingCriteria

        self.sequences = [Sequence(ids, Sampling(), StoppingCriteria(self.length, []), self.length) for ids in prompts]
        self.engine.submit(self.sequences)
        while any(not sequence.num_generated for sequence in self.sequences):
            self.engine.step()

    def step(self) -> None:
        self.engine.step()

    def logits(self, prompt: list[int]) -> np.ndarray:
        from pace.llm.clients.session import Session
        from pace.llm.engine.driver import EngineDriver

        self.reserve(0, 0)
        driver = EngineDriver(self.engine)
        try:
            return Session(driver).append(prompt)[-1].float().numpy()
        finally:  # the engine is stepped by hand again
            driver.close()
