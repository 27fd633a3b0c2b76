"""A missing library, or one with an unsupported version, gives one clear error that says what to install."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def import_with(monkeypatch):
    """`import_with("guidance", library)` imports our package again, with `library` as guidance, or without it."""

    def import_with(name: str, library: types.ModuleType | None) -> None:
        room = f"pace.integrations.{name}"
        for module in [module for module in sys.modules if module.startswith(room)]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, library)
        importlib.import_module(room)

    return import_with


def test_extras_are_added_without_a_compiler():
    """`".[serve]"` compiles pace again; shells such as zsh do not take the brackets without quotes."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = 0
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "pace").rglob("*.py")):
        for words in re.findall(r"""pip install ["']?(?:pace-llm|\.)\[.*""", path.read_text()):
            named = re.match(r'pip install "pace-llm\[([\w,-]+|NAME)\]"', words)
            is_advice_against = words.startswith('pip install ".[serve]"` would compile')
            assert is_advice_against or named and {*named[1].split(",")} <= {*extras, "NAME"}, f"{path}: {words}"
            found += 1
    assert found > 10


@pytest.mark.parametrize("name", ["guidance", "kani", "lm_eval", "ray"])
def test_it_is_missing(import_with, name):
    extra = name.replace("_", "-")
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "pace-llm\[{extra}\]"'):
        import_with(name, None)


def test_a_package_without_contents_is_none(import_with):
    """If kani was uninstalled but an extension of it remains, `kani` is a namespace package."""
    with pytest.raises(ModuleNotFoundError, match=r'pip install "pace-llm\[kani\]"'):
        import_with("kani", types.ModuleType("kani"))


@pytest.mark.parametrize(
    ("name", "wanted", "version"),
    [("guidance", "guidance 0.3", version) for version in ("0.2.5", "0.4.0", "1.0")]
    + [("kani", "kani 1.7 and later", version) for version in ("1.6.2", "2.0.0", "0.9")]
    + [("ray", "ray 2.60.*", version) for version in ("1.13.0", "2.59.1", "3.0.0")],
)
def test_it_is_of_another_version(import_with, name, wanted, version):
    other = types.ModuleType(name)
    other.__version__ = version
    with pytest.raises(ImportError, match=f"{wanted}, and {version} is installed"):
        import_with(name, other)


def test_pace_itself_needs_none_of_them(monkeypatch):
    for name in ("guidance", "kani", "lm_eval", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    assert importlib.import_module("pace.integrations") is not None
