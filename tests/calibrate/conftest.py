"""Fixtures of the calibration tests."""

from __future__ import annotations

import pytest

from pace.calibrate import migration, quantize


@pytest.fixture
def one_strength(monkeypatch):
    """Tries only one strength of a migration, for tests that do not measure its quality."""
    monkeypatch.setattr(migration, "STRENGTHS", (0.3,))


@pytest.fixture
def token_ids(monkeypatch):
    """Takes texts as token ids: tiny checkpoints have no tokenizer."""
    monkeypatch.setattr(quantize, "load_tokenizer", lambda *arguments: None)
