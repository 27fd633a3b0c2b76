"""Models of checkpoints on disk, loaded once per process."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from pace.llm import LLMModel, SamplingConfig
from tests.support import backends

BACKENDS = [{"reference": "torch"}.get(name, name) for name in backends()]
GREEDY = SamplingConfig(max_new_tokens=20, ignore_eos=True)


@functools.cache
def load(folder: Path, backend: str) -> LLMModel:
    """Returns the model in float32."""
    return LLMModel(folder, dtype=torch.float32, backend=backend, progress=False)
