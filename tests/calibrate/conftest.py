"""What the tests of calibration share."""

from __future__ import annotations

import pytest

from pace.calibrate import migration, quantize


@pytest.fixture
def few_strengths(monkeypatch):
    """Two strengths of a migration are tried, where it does not matter how good the best is."""
    monkeypatch.setattr(migration, "STRENGTHS", (0.3, 0.6))


@pytest.fixture
def token_ids(monkeypatch):
    """Texts are given as tokens: tiny checkpoints have no tokenizer."""
    monkeypatch.setattr(quantize, "load_tokenizer", lambda *arguments: None)
