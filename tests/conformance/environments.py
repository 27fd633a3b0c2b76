"""What suites need of others: packages, source archives, checkouts. All of it in a cache outside the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

CACHE = Path(os.environ.get("PACE_CONFORMANCE_CACHE", Path.home() / ".cache" / "pace-conformance")).resolve()


def environment(folder: Path, packages: Iterable[str]) -> Path:
    """The Python of a virtual environment in `folder` with `packages`, and with those of this process behind them.
    Raises RuntimeError where one cannot be had."""
    home, wanted = folder / "venv", " ".join(packages)
    python, stamp = home / "bin" / "python", home / "packages.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    _call([sys.executable, "-m", "venv", "--without-pip", home])
    site = next((home / "lib").glob("python*")) / "site-packages"
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _call([python, "-m", "pip", "install", "--quiet", *wanted.split()])
    stamp.write_text(wanted)
    return python


def source_archive(folder: Path, package: str) -> Path:
    """The folder of a package's source archive, unpacked and not installed. Raises RuntimeError."""
    name, version = package.split("==")
    home = folder / f"{name.replace('-', '_')}-{version}"
    if not home.exists():
        archive = home.with_name(f"{home.name}.tar.gz")
        if not archive.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            _call([*command, "--no-binary", name, "--dest", folder, package])
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    return home


def checkout(folder: Path, url: str) -> Path:
    """A checkout of a repository's newest commit, made once. Raises RuntimeError."""
    home = folder / url.rsplit("/", 1)[-1]
    if not home.exists():
        _call(["git", "clone", "--quiet", "--depth", "1", url, home])
    return home


def _call(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}".strip())
