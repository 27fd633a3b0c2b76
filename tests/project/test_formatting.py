"""Every source is formatted as by `make format`, and types fit in the rooms that pyproject.toml lists, by the tools'
versions that it pins."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPP_SOURCES = [
    path
    for folder in ("csrc", "tests/csrc")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cpp", ".h", ".inl")
]
PINS = dict(
    pin.split("==")
    for pin in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["format"]
)


def run(tool: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Runs a pinned tool of this environment."""
    command = shutil.which(tool, path=str(Path(sys.executable).parent))
    assert command, f"{tool} is not installed beside this Python: pip install {tool}=={PINS[tool]}"
    return subprocess.run([command, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120)


def problems_in_cpp(*paths: Path) -> str:
    return run("clang-format", "--dry-run", "--Werror", *paths).stderr


@pytest.mark.parametrize("tool", PINS)
def test_the_tools_are_the_pinned_ones(tool):
    assert PINS[tool] in run(tool, "--version").stdout.split()


@pytest.mark.parametrize("command", [("format", "--check"), ("check",)], ids=lambda command: command[0])
def test_python(command):
    result = run("ruff", *command, ".")
    assert result.returncode == 0, f"run: make format\n{result.stdout}{result.stderr}"


def test_cpp():
    assert len(CPP_SOURCES) > 50
    assert problems_in_cpp(*CPP_SOURCES) == "", "run: make format"


def test_types_fit():
    result = run("mypy")
    assert result.returncode == 0, result.stdout


def test_faults_are_found(tmp_path):
    """Each command fails on a wrong source, with the settings of this repository."""
    shutil.copy(ROOT / ".clang-format", tmp_path)
    (tmp_path / "wrong.cpp").write_text("int  main( ){return 0;}\n")
    assert "wrong.cpp:1" in problems_in_cpp(tmp_path / "wrong.cpp")
    (tmp_path / "wrong.py").write_text("import os\nx = [1,2]\n")
    settings = ("--config", ROOT / "pyproject.toml", tmp_path)
    assert "F401" in run("ruff", "check", *settings).stdout
    assert run("ruff", "format", "--check", *settings).returncode == 1
    (tmp_path / "wrong.py").write_text("x: int = 'one'\n")
    settings = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache")
    assert "[assignment]" in run("mypy", *settings, tmp_path / "wrong.py").stdout
