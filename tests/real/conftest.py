"""Real models, opened once per test file, and the recorded results for a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pace.llm import LLMModel
from tests.real.packages import CACHE, MODELS, RealModel, Unavailable, fetch

RESULTS = CACHE / "results.json"
"""Recorded results: title of a table -> model -> name -> value, for `python -m tests.real.page`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test with an argument `real` for each model."""
    if "real" in metafunc.fixturenames:
        metafunc.parametrize("real", MODELS.values(), ids=list(MODELS), scope="module", indirect=True)


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> RealModel:
    """A model whose file is available."""
    try:
        fetch(request.param)
    except Unavailable as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module")
def model(real: RealModel) -> Iterator[LLMModel]:
    with LLMModel(real.path, progress=False, max_seq_len=4096 if real.name != "smollm2" else 2048) as model:
        yield model


@pytest.fixture
def talker(real: RealModel, model: LLMModel) -> LLMModel:
    """A model that was trained on conversations."""
    if not real.chats:
        pytest.skip(f"{real.title} has no chat template")
    return model


@pytest.fixture(scope="module")
def reference(real: RealModel) -> Iterator[LLMModel]:
    """The same weights in plain torch, float32."""
    with LLMModel(real.path, dtype="float32", backend="torch", progress=False, max_seq_len=2048) as model:
        yield model


@pytest.fixture
def record(real: RealModel) -> Callable[[str, str, object], None]:
    """`record(table, name, value)` adds a value to the page of results."""

    def add(table: str, name: str, value: object) -> None:
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        found.setdefault(table, {}).setdefault(real.title, {})[name] = value
        Path(RESULTS).write_text(json.dumps(found, indent=1))

    return add
