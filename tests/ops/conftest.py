"""What every test of operations leaves as it was, from which random numbers it starts, and on which tables it runs."""

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
