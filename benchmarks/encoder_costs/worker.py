"""An embedding model in a separate process: `python -m benchmarks.encoder_costs.worker RUNTIME`. Its other end is
`Worker` of `benchmarks.comparison`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.comparison.worker import serve
from benchmarks.encoder_costs.peers import LlamaCpp, OnnxRuntime, Runtime, SentenceTransformers, as_texts

PACE = {"fp32": ("float32", None), "bf16": ("bfloat16", None), "int8": ("bfloat16", "int8")}
"""Weights -> dtype and quantization."""
PEAK_SECONDS = 0.3


class Pace(Runtime):
    def load(self, checkpoint: str, variant: str, threads: int, **unused: Any) -> None:
        from pace.llm import EmbeddingModel

        dtype, quantization = PACE[variant]
        options = {"dtype": dtype, "quantization": quantization, "num_threads": threads}
        self.model = EmbeddingModel(checkpoint, prefix_cache_bytes=0, progress=False, **options)

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        return self.model.embed(as_texts(ids)).numpy()

    def peak(self) -> float:
        """The fp32 multiply-add peak of the machine, in operations per second."""
        from pace import _C

        return _C.fma_peak(PEAK_SECONDS)


KINDS = {"pace": Pace, "sentence-transformers": SentenceTransformers, "onnxruntime": OnnxRuntime,
         "llama.cpp": LlamaCpp}  # fmt: skip


class Server:
    """The operations of the driver. `ids` are words, without special tokens."""

    def __init__(self, kind: str) -> None:
        self.runtime: Runtime = KINDS[kind]()

    def load(self, **arguments: Any) -> dict[str, Any]:
        self.runtime.load(**arguments)
        return {}

    def tune(self, ids: list[list[int]]) -> dict[str, Any]:
        """Keeps the fastest setting for these texts; also warms up."""
        self.runtime.embed(ids[:2])
        seconds = {}
        for setting in self.runtime.settings:
            self.runtime.use(setting)
            seconds[setting] = self.run(ids)["seconds"]
        best = min(seconds, key=seconds.__getitem__)
        self.runtime.use(best)
        return {"setting": best}

    def run(self, ids: list[list[int]]) -> dict[str, Any]:
        started = time.perf_counter()
        self.runtime.embed(ids)
        return {"seconds": time.perf_counter() - started}

    def each(self, ids: list[list[int]]) -> dict[str, Any]:
        """The median time of one text."""
        return {"seconds": float(np.median([self.run([text])["seconds"] for text in ids]))}

    def vectors(self, ids: list[list[int]], path: str) -> dict[str, Any]:
        np.save(path, self.runtime.embed(ids))
        return {}

    def peak(self) -> dict[str, Any]:
        return {"flops": self.runtime.peak()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers, Server(sys.argv[1]))


if __name__ == "__main__":
    main()
