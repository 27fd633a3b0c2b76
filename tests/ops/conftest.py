"""Settings of every operation test: the state that is restored, the random seed, and the tables."""

from __future__ import annotations

import pytest
import torch

from tests.ops.isas import FLOATS, VECTORS


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("tier") == "all":
        VECTORS[:] = FLOATS


@pytest.fixture(autouse=True)
def as_before(restore_isa_and_threads: None) -> None:
    torch.manual_seed(0)
