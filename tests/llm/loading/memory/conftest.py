"""Fixture for tests of memory and files."""

from __future__ import annotations

import pytest

from pace.checkpoints import reader


@pytest.fixture
def reads(monkeypatch):
    """Returns a list that collects the names of tensors when they are read."""
    names = []
    read = reader.CheckpointReader.read
    monkeypatch.setattr(
        reader.CheckpointReader, "read", lambda self, name, *rows: names.append(name) or read(self, name, *rows)
    )
    return names
