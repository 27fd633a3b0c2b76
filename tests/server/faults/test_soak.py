"""A minute of everything at once. `python -m tests.server.faults.soak --seconds 3600` is the longer one."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")


@pytest.mark.timeout(240)
def test_honest_texts_stay_exact_beside_faulty_clients():
    from tests.server.faults.soak import soak

    counts = soak(55.0, 32, 12, seed=1)
    assert counts["honest"] > 100
