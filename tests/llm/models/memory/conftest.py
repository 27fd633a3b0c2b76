"""What tests of memory and files share."""

from __future__ import annotations

import pytest

from pace.checkpoints import reader


@pytest.fixture
def reads(monkeypatch):
    """The names of tensors, as they are read."""
    names = []
    read = reader.CheckpointReader.read
    monkeypatch.setattr(
        reader.CheckpointReader, "read", lambda self, name, *rows: names.append(name) or read(self, name, *rows)
    )
    return names
