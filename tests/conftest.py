"""One thread of torch in every process of the tests. Their tensors are tiny: a second thread costs more than it brings, and several times as much where
two processes share two cores, for torch's threads spin while they wait (a calibration: 79 s of processor time, 11 s with one)."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of what tests start, and of torch here, which reads it when it is imported

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Whatever a test before has set."""
    torch.set_num_threads(1)
