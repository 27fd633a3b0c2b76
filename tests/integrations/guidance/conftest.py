"""guidance is an extra: if it is not installed, nothing here is collected. `make conformance ARGS=guidance_pace` runs
these tests with guidance installed."""

from __future__ import annotations

import importlib.util

import pytest

from pace.assets import TINY
from pace.llm import LLMModel

collect_ignore_glob = [] if importlib.util.find_spec("guidance") else ["test_*.py"]


@pytest.fixture(scope="session")
def model():
    with LLMModel(TINY, dtype="float32", progress=False) as model:
        yield model


@pytest.fixture
def lm(model):
    """A guidance model that does not compute all tokens' probabilities, which only guidance's display needs."""
    from pace.integrations.guidance import Pace

    lm = Pace(model, echo=False)
    yield lm
    lm.close()
