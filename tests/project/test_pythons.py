"""The Pythons of a machine that can build pace, their use by `make`, and the name of a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pythons

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
THIS = "%d.%d" % sys.version_info[:2]
SHIM = "pyenv: python3.12: command not found"
"""Message of pyenv's commands if a version is installed but not selected."""

INTERPRETER = """#!/bin/sh
case $2 in
*ensurepip*) printf '%s\\n' {implementation} {version} {free_threaded} {ensurepip} {headers} ;;
*) echo {version} ;;
esac
"""


def fake(path: Path, fails: str = "", **answers: object) -> Path:
    """A command that answers like a suitable interpreter of the version in its name, except for `answers`. If `fails`
    is given, the command prints it and fails."""
    fit = {"implementation": "CPython", "free_threaded": False, "ensurepip": True, "headers": True}
    fit["version"] = path.name.removeprefix("python")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{fails}' >&2\nexit 127\n" if fails else INTERPRETER.format(**fit | answers))
    path.chmod(0o755)
    return path


@pytest.fixture
def places(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Two empty folders: the first one in PATH, and the folder of pyenv's versions."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    for tool in ("sh", "make", "find", "nproc", "ls"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path / "bin", tmp_path / "pyenv" / "versions"


def in_pyenv(versions: Path, release: str, **answers: object) -> Path:
    return fake(versions / release / "bin" / f"python{'.'.join(release.split('.')[:2])}", **answers)


def make(*arguments: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60)


def test_the_versions_are_those_that_the_package_names():
    prefix = "Programming Language :: Python :: 3."
    assert pythons.VERSIONS == tuple(
        name.removeprefix(prefix[:-2]) for name in PROJECT["classifiers"] if name.startswith(prefix)
    )
    assert PROJECT["requires-python"] == f">={pythons.VERSIONS[0]}"


def test_path_comes_before_pyenv_and_its_newest_release_first(places):
    path, versions = places
    for release in ("3.12.9", "3.12.10", "3.12.10rc1", "3.12-dev", "3.12.11t"):
        in_pyenv(versions, release, free_threaded=release.endswith("t"))
    newest = versions / "3.12.10" / "bin" / "python3.12"
    assert pythons.find("3.12")[0] == newest
    shim = fake(path / "python3.12", fails=SHIM)
    assert pythons.find("3.12") == (newest, [f"{shim}: it does not start: {SHIM}", *pythons.find("3.12")[1][1:]])
    fake(path / "python3.12")
    assert pythons.find("3.12") == (path / "python3.12", [])


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"fails": "no libpython"}, "it does not start: no libpython"),
        ({"implementation": "PyPy"}, "it is PyPy; pace needs CPython"),
        ({"version": "3.13"}, "it is Python 3.13"),
        ({"version": "3.9"}, "it is Python 3.9; pace needs 3.11 or newer"),
        ({"free_threaded": True}, "it is a free-threaded build, which pace has no wheels for"),
        ({"ensurepip": False}, "it has no ensurepip; on Debian, install python3.12-venv"),
        ({"headers": False}, "it has no Python.h; on Debian, install python3.12-dev"),
    ],
)
def test_an_interpreter_that_cannot_build_pace_says_why(places, answers, reason):
    python = fake(places[0] / "python3.12", **answers)
    assert pythons.find("3.12") == (None, [f"{python}: {reason}"])
    with pytest.raises(ValueError, match="no Python 3.12 can be used: .*") as error:
        pythons.resolve("3.12")
    assert reason in str(error.value)


def test_this_python_can_build_pace():
    assert pythons.why_not(sys.executable) is None and pythons.why_not(sys.executable, THIS) is None


def test_a_python_is_named_by_its_version_command_or_path(places):
    path, versions = places
    in_path, elsewhere = fake(path / "python3.12"), in_pyenv(versions, "3.13.1")
    assert {pythons.resolve(name) for name in ("3.12", "python3.12", str(in_path))} == {in_path}
    assert {pythons.resolve(name) for name in ("3.13", "python3.13", str(elsewhere))} == {elsewhere}
    assert pythons.resolve("python3") == path / "python3"
    fake(path / "python3.9")
    for name, reason in {"python3.9": "3.11 or newer", "3.14": "no python3.14 in PATH", "snake": "no such"}.items():
        with pytest.raises(ValueError, match=reason):
            pythons.resolve(name)


def test_wheels_are_made_for_every_version_there_is(places):
    path, versions = places
    fake(path / "python3.11"), fake(path / "python3.12", fails=SHIM), in_pyenv(versions, "3.13.1")
    done = make("wheels")
    made = [line.split("/")[0] for line in done.stdout.splitlines() if "bdist_wheel" in line]
    assert done.returncode == 0 and made == [".venv-3.11", ".venv-3.13"], done.stdout + done.stderr
    assert f"skipped Python 3.12: {path / 'python3.12'}: it does not start: {SHIM}\n" in done.stderr
    assert "skipped Python 3.14: there is no python3.14 in PATH or in pyenv\n" in done.stderr
    assert len({line.split()[-1] for line in done.stdout.splitlines() if "bdist_wheel" in line}) == 1
    checked = [line.split("/")[0] for line in make("check-pythons").stdout.splitlines() if " -m pytest " in line]
    assert checked == made


def test_where_no_python_can_build_pace_make_fails(places):
    done = make("wheels", "VENV=nowhere")  # the environment of a built tree has a Python, and would be first in PATH
    assert done.returncode and done.stderr.count("skipped Python") == len(pythons.VERSIONS)


def test_a_python_that_is_named_has_an_environment_of_its_own(places):
    path, _ = places
    fake(path / "python3.12")
    for target in ("check", "test", "demo", "wheel"):
        assert ".venv-3.12/bin/python " in make(target, "PYTHON=3.12").stdout, target
        assert ".venv/bin/python " not in make(target, "PYTHON=3.12").stdout, target
        assert ".venv-" not in make(target).stdout, target
    done = make("check", "PYTHON=3.13")
    assert done.returncode and "PYTHON: no Python 3.13 can be used: there is no python3.13" in done.stderr


TAG = """
import sys
from pathlib import Path
import setuptools
from distutils.core import run_setup
wheel = run_setup("setup.py", stop_after="init").get_command_obj("bdist_wheel")
wheel.get_finalized_command("build").build_lib = sys.argv[1]
wheel.ensure_finalized()
print("-".join(wheel.get_tag()))
"""


def test_a_wheel_is_called_by_its_python_and_its_glibc(tmp_path):
    pytest.importorskip("setuptools")
    (extension,) = (ROOT / "pace").glob(f"_C.{sys.implementation.cache_tag}-*.so")
    (tmp_path / "pace").mkdir()
    (tmp_path / "pace" / extension.name).symlink_to(extension)
    command = [sys.executable, "-c", TAG, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    python = f"cp{THIS.replace('.', '')}"
    assert re.fullmatch(rf"{python}-{python}-manylinux_2_\d+_x86_64\n", done.stdout), done.stdout + done.stderr
