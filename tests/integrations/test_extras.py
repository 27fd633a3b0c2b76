"""A library that is missing, or of a version that does not fit, is one clear error that says what to install."""

from __future__ import annotations

import importlib
import sys
import types

import pytest


@pytest.fixture
def import_with(monkeypatch):
    """`import_with(guidance)` imports the room anew, where `import guidance` gives that module, or nothing."""

    def import_with(library: types.ModuleType | None) -> None:
        for name in [name for name in sys.modules if name.startswith("pace.integrations.guidance")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "guidance", library)
        importlib.import_module("pace.integrations.guidance")

    return import_with


def test_guidance_is_missing(import_with):
    with pytest.raises(ModuleNotFoundError, match=r'pip install "pace-llm\[guidance\]"'):
        import_with(None)


@pytest.mark.parametrize("version", ["0.2.5", "0.4.0", "1.0"])
def test_guidance_is_of_another_version(import_with, version):
    other = types.ModuleType("guidance")
    other.__version__ = version
    with pytest.raises(ImportError, match=f"guidance 0.3, and {version} is installed"):
        import_with(other)


def test_pace_itself_needs_none_of_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "guidance", None)
    assert importlib.import_module("pace.integrations") is not None
