from __future__ import annotations

import pytest

from pace.bench import limits


@pytest.fixture
def quick_limits(monkeypatch):
    """Limits of the machine in a moment: a small buffer, a hundredth of a second."""
    monkeypatch.setattr(limits, "BUFFER_BYTES", 4 << 20)
    slow = limits.measure
    monkeypatch.setattr(limits, "measure", lambda seconds=0.01: slow(0.01))
