"""The soak test, for a few seconds or a minute. `python -m tests.server.faults.soak --seconds 3600` runs longer."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")


@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("seconds", "num_honest", "num_faulty", "least"),
    [(2.0, 8, 8, 20), pytest.param(55.0, 32, 12, 100, marks=pytest.mark.thorough)],
)
def test_honest_texts_stay_exact_beside_faulty_clients(seconds, num_honest, num_faulty, least):
    from tests.server.faults.soak import FAULTS, soak

    counts = soak(seconds, num_honest, num_faulty, seed=1)
    assert counts["honest"] > least, counts
    assert {fault.__name__ for fault in FAULTS} <= counts.keys()
