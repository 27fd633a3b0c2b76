from __future__ import annotations

import pytest

from pace.bench import limits


@pytest.fixture
def quick_limits(monkeypatch):
    """Measures the machine's limits quickly: with a small buffer, for a hundredth of a second."""
    monkeypatch.setattr(limits, "BUFFER_BYTES", 4 << 20)
    slow = limits.measure
    monkeypatch.setattr(limits, "measure", lambda seconds=0.01: slow(0.01))
