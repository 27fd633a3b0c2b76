"""Fixture: a model on each backend."""

from __future__ import annotations

import pytest

from pace.llm import LLMModel
from tests.llm.generation.loaded import BACKENDS, load


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def model(checkpoint, backend) -> LLMModel:
    """Returns a Llama with a byte-level tokenizer."""
    return load(checkpoint("llama")[0], backend)
