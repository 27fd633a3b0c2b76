"""A library that is missing, or of a version that does not fit, is one clear error that says what to install."""

from __future__ import annotations

import importlib
import sys
import types

import pytest


@pytest.fixture
def import_with(monkeypatch):
    """`import_with("guidance", module)` imports the room anew, where `import guidance` gives that module, or nothing."""

    def import_with(name: str, library: types.ModuleType | None) -> None:
        for other in [other for other in sys.modules if other.startswith(f"pace.integrations.{name}")]:
            monkeypatch.delitem(sys.modules, other)
        monkeypatch.setitem(sys.modules, name, library)
        importlib.import_module(f"pace.integrations.{name}")

    return import_with


@pytest.mark.parametrize("name", ["guidance", "ray"])
def test_a_library_is_missing(import_with, name):
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "pace-llm\[{name}\]"'):
        import_with(name, None)


@pytest.mark.parametrize(
    "name, version, fits",
    [("guidance", version, "guidance 0.3") for version in ("0.2.5", "0.4.0", "1.0")]
    + [("ray", version, "ray 2.60") for version in ("1.13.0", "2.59.1", "3.0.0")],
)
def test_a_library_is_of_another_version(import_with, name, version, fits):
    other = types.ModuleType(name)
    other.__version__ = version
    with pytest.raises(ImportError, match=f"works with {fits}.*{version} is installed"):
        import_with(name, other)


def test_pace_itself_needs_none_of_them(monkeypatch):
    for name in ("guidance", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    assert importlib.import_module("pace.integrations") is not None
