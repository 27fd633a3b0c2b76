"""Finds the Pythons of this machine that can build pace, in PATH, then in pyenv, newest first.

    python3 pythons.py            prints one path per line; stderr shows the versions without one, and why

    python3 pythons.py PYTHON     prints the path of one: a version (3.12), a command (python3.12) or a path

The Makefile runs it. It works on Python 3.8 or newer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""Versions for which `make wheels` makes a wheel; the same as in the classifiers of pyproject.toml."""

ASK = """
import importlib.util, os, platform, sys, sysconfig
print(platform.python_implementation())
print("%d.%d" % sys.version_info[:2])
print(bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
print(importlib.util.find_spec("ensurepip") is not None)
print(os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
"""


def why_not(python: str | Path, version: str | None = None) -> str | None:
    """The reason why this interpreter cannot build pace, or None. `version` is the required version; by default any
    version that pace supports."""
    try:
        done = subprocess.run([str(python), "-c", ASK], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not start: {error}"
    if done.returncode:
        return f"it does not start: {first_line(done.stderr)}"  # pyenv has commands for versions that are not selected
    implementation, found, free_threaded, has_pip, has_headers = done.stdout.split()
    if implementation != "CPython":
        return f"it is {implementation}; pace needs CPython"
    if number(found) < number(VERSIONS[0]):
        return f"it is Python {found}; pace needs {VERSIONS[0]} or newer"
    if version and found != version:
        return f"it is Python {found}"
    if free_threaded == "True":
        return "it is a free-threaded build, which pace has no wheels for"
    if has_pip != "True":
        return f"it has no ensurepip; on Debian, install python{found}-venv"
    if has_headers != "True":
        return f"it has no Python.h; on Debian, install python{found}-dev"
    return None


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "it says nothing")


def candidates(version: str) -> list[Path]:
    """Interpreters that may have this version: in PATH first, then in pyenv, the newest first."""
    folders = filter(None, os.environ.get("PATH", "").split(os.pathsep))
    found = [Path(folder, f"python{version}") for folder in folders]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found += sorted(pyenv.glob(f"{version}.*/bin/python{version}"), key=patch, reverse=True)
    return list(dict.fromkeys(path for path in found if os.access(path, os.X_OK)))


def patch(python: Path) -> tuple[int, bool]:
    """Sort key of pyenv's releases: 3.12.9 is before 3.12.10, and 3.14.0rc1 before 3.14.0."""
    number, rest = re.match(r"\d+\.\d+\.(\d*)(.*)", python.parents[1].name).groups()
    return int(number or 0), not rest


def find(version: str) -> tuple[Path | None, list[str]]:
    """The first interpreter of this version that can build pace, or None, and the reasons why earlier ones cannot."""
    reasons = []
    for python in candidates(version):
        reason = why_not(python, version)
        if reason is None:
            return python, reasons
        reasons.append(f"{python}: {reason}")
    return None, reasons or [f"there is no python{version} in PATH or in pyenv"]


def resolve(python: str) -> Path:
    """The interpreter for a version, a command or a path. Raises ValueError if it cannot build pace."""
    version = re.fullmatch(r"(?:python)?(3\.\d+)", python)
    if version:
        found, reasons = find(version[1])
        if found is None:
            raise ValueError(f"no Python {version[1]} can be used: {'; '.join(reasons)}")
        return found
    path = shutil.which(python)
    reason = why_not(path) if path else "there is no such command"
    if reason:
        raise ValueError(f"{python} cannot be used: {reason}")
    return Path(path).absolute()


def main(arguments: list[str]) -> int:
    if arguments:
        try:
            print(*map(resolve, arguments), sep="\n")
        except ValueError as error:
            print(f"PYTHON: {error}", file=sys.stderr)
            return 1
        return 0
    found = {version: find(version) for version in VERSIONS}
    for version, (python, reasons) in found.items():
        if python:
            print(python)
        else:
            print(f"skipped Python {version}: {'; '.join(reasons)}", file=sys.stderr)
    return 0 if any(python for python, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
