"""A copy of a tree, in which bugs are planted, built and tested."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.planted.bugs import Bug

BUILD = Path("build") / "cmake"
"""Build folder of setup.py and tests/test_csrc.py, which share compiled files."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""File in which pytest keeps the exact ids of the failed tests."""
FORMATTING = "tests/project/test_formatting.py"
"""Test file that is left out: it would fail for a planted line that is too long."""


class DoesNotBuild(Exception):
    """The extension cannot be compiled, or not in time."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run of pytest."""

    status: int | None
    """The exit code; None if the run did not end in time."""
    failed: list[str]
    """Ids of tests that failed, and files that could not be collected."""
    output: str


class Copy:
    """A copy of a tree's files that git tracks, with its built extension, in a separate folder."""

    def __init__(self, tree: Path, folder: Path, pytest_arguments: Sequence[str]):
        self.folder = folder
        self._tree = tree
        self._arguments = pytest_arguments
        self._jobs = str(len(os.sched_getaffinity(0)))
        self.known = {FORMATTING}
        """Tests that are left out, among them those that failed without a bug."""
        names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True).stdout
        self._extensions = sorted(tree.glob("pace/_C.*.so"))
        if not self._extensions:
            raise FileNotFoundError(f"{tree}/pace has no extension _C; build it first, for example with `make test`")
        for name in [*filter(None, names.split("\0")), *(str(path.relative_to(tree)) for path in self._extensions)]:
            if (tree / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, folder / name)
        found = self.run([sys.executable, "-c", "import pace; print(pace.__file__)"], 60)[1].strip()
        if found != str(folder / "pace" / "__init__.py"):
            raise RuntimeError(f"tests would import {found} instead of the copy in {folder}")

    def plant(self, bug: Bug, build_seconds: float) -> None:
        """Puts the bug into the copy, unless it is there, and compiles it if needed. Raises DoesNotBuild."""
        text = (self._tree / bug.file).read_text(encoding="utf-8").replace(bug.find, bug.replace)
        if self._write(bug.file, text) and bug.is_native:
            self.build(build_seconds, "_C")

    def restore(self, bug: Bug) -> None:
        """Removes the bug. Native sources are then newer than their objects, and are compiled again."""
        if self._write(bug.file, (self._tree / bug.file).read_text(encoding="utf-8")) and bug.is_native:
            for path in self._extensions:
                shutil.copy2(path, self.folder / "pace")

    def _write(self, name: str, text: str) -> bool:
        """Writes a file if its text differs. Returns True if it did."""
        path = self.folder / name
        if path.read_text(encoding="utf-8") == text:
            return False
        path.write_text(text, encoding="utf-8")
        return True

    def build(self, seconds: float, target: str = "all") -> None:
        """Builds a target. tests/test_csrc.py rebuilds the C++ tests if needed. CMake cannot use a build folder made
        for another path, so the first build compiles everything. Raises DoesNotBuild."""
        import pybind11

        configure = ["cmake", "-S", ".", "-B", str(BUILD), "-G", "Ninja", "-DPACE_PYTHON=ON", "-DPACE_TESTS=ON"]
        configure += [f"-DPACE_TABLES={os.environ.get('PACE_TABLES', 'tests')}"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        configure += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.folder / 'pace'}", "-U", "CMAKE_MAKE_PROGRAM"]
        for command in (configure, ["cmake", "--build", str(BUILD), "--parallel", self._jobs, "--target", target]):
            status, output = self.run(command, seconds)
            if status != 0:
                raise DoesNotBuild("the build took too long" if status is None else output[-2000:])

    def pytest(self, tests: Sequence[str], without: Sequence[str], seconds: float, stops: bool = True) -> Outcome:
        """Runs `tests` in one process or, if it is empty, all except those in `without`. `stops`: end at the first
        failure."""
        (self.folder / LAST_FAILED).unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0" if tests else self._jobs,
            "-q",
            *["-x"] * stops,
            *self._arguments,
            *tests,
        ]
        command += [f"--ignore={path}" for path in without]
        command += [f"--{'deselect' if '::' in test else 'ignore'}={test}" for test in sorted(self.known)]
        status, output = self.run(command, seconds)
        cache = self.folder / LAST_FAILED
        return Outcome(status, list(json.loads(cache.read_text())) if cache.exists() else [], output)

    def run(self, command: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Exit code and output of a command in the copy. After `seconds` it is killed with all its child processes, and
        the exit code is None."""
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        log = self.folder.with_suffix(".log")
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _kill_group(process)
        return status, log.read_text(encoding="utf-8", errors="replace")


def _kill_group(process: subprocess.Popen) -> None:
    """Ends the process and the processes that it left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
