"""What the tests of calibration share."""

from __future__ import annotations

import pytest

from pace.calibrate import migration, quantize


@pytest.fixture
def one_strength(monkeypatch):
    """One strength of a migration is tried, where it does not matter how good the best is."""
    monkeypatch.setattr(migration, "STRENGTHS", (0.3,))


@pytest.fixture
def token_ids(monkeypatch):
    """Texts are given as tokens: tiny checkpoints have no tokenizer."""
    monkeypatch.setattr(quantize, "load_tokenizer", lambda *arguments: None)
