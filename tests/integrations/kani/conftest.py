"""kani is an extra: if it is not installed, nothing here is collected."""

from __future__ import annotations

import asyncio
import importlib.util
import time

import pytest

from pace.assets import TINY
from pace.llm import LLMModel
from tests.waiting import PATIENCE

collect_ignore_glob = [] if importlib.util.find_spec("kani") else ["test_*.py"]


@pytest.fixture(scope="session")
def model():
    with LLMModel(TINY, dtype="float32", progress=False) as model:
        yield model


@pytest.fixture
def make_engine(model):
    """`make_engine(**arguments)` makes an engine on the session's model."""
    from pace.integrations.kani import PaceEngine

    return lambda **arguments: PaceEngine(model=model, **arguments)


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def run():
    """Runs a coroutine on a new event loop."""

    def run(coroutine):
        async def within():
            return await asyncio.wait_for(coroutine, PATIENCE)

        return asyncio.run(within())

    return run


@pytest.fixture
def slow():
    """Hyperparameters of a long answer whose tokens each take at least `seconds`."""

    def slow(seconds: float):
        def wait(ids, logits):
            time.sleep(seconds)
            return logits

        return {"logits_processors": [wait], "ignore_eos": True}

    return slow
