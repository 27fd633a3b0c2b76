"""A copy of the sources, to which a recipe of CONTRIBUTING.md is applied."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILT_TABLES = ["avx2", "emulated_avx512_bf16", "generic"]
"""Tables with vectors of 4, 8 and 16 lanes that run on any CPU with AVX2."""


class Copy:
    """A copy of the sources that a recipe changes and that tests read, in a separate folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.touched: set[str] = set()
        # Bytecode goes along, except for files that another process is writing. Changed sources are compiled anew.
        for name in ("pace", "csrc", "tests", "docs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*", "*.png"))
        for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml", "CMakeLists.txt"):
            shutil.copy(ROOT / name, folder)

    def remove(self, path: str) -> None:
        (self.folder / path).unlink()

    def remove_lines(self, path: str, pattern: str) -> None:
        """Removes the lines in which `pattern` occurs."""
        lines = (self.folder / path).read_text().splitlines(keepends=True)
        kept = [line for line in lines if not re.search(pattern, line)]
        assert kept != lines, f"{path} has no line with {pattern}"
        (self.folder / path).write_text("".join(kept))

    def write(self, path: str, text: str) -> None:
        """Writes a new file."""
        assert not (self.folder / path).exists(), f"{path} is there already: choose another toy"
        (self.folder / path).write_text(text)
        self.touched.add(path)

    def add_after(self, path: str, beginning: str, text: str) -> None:
        """Inserts lines after the first one that begins with `beginning`."""
        self._insert(path, beginning, text, behind=True)

    def add_before(self, path: str, beginning: str, text: str) -> None:
        """Inserts lines before the first one that begins with `beginning`."""
        self._insert(path, beginning, text, behind=False)

    def _insert(self, path: str, beginning: str, text: str, behind: bool) -> None:
        old = (self.folder / path).read_text()
        found = re.search(rf"^{re.escape(beginning)}.*\n", old, re.MULTILINE)
        assert found, f"{path} has no line that begins with {beginning!r}"
        place = found.end() if behind else found.start()
        (self.folder / path).write_text(old[:place] + text + old[place:])
        self.touched.add(path)

    def run(self, *command: object) -> tuple[int, str]:
        """Exit status and output."""
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        result = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=850,
        )
        return result.returncode, result.stdout

    def pytest(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of the copy's tests, which import the copy's `pace`."""
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-o", "verbosity_subtests=1"]
        return self.run(sys.executable, "-m", "pytest", *options, *arguments)

    def build(self, *test_sources: str) -> None:
        """Builds the extension with the kernels of `BUILT_TABLES`, and only the C++ tests of these files, all without
        optimisation. A full build would take minutes."""
        import pybind11

        for path in (self.folder / "tests" / "csrc").glob("test_*.cpp"):
            if path.name not in test_sources:
                path.unlink()
        lists = self.folder / "CMakeLists.txt"
        lists.write_text(re.sub(r"-O[123]\)", "-O0)", lists.read_text()))
        for command in (
            [
                "cmake",
                "-S",
                ".",
                "-B",
                "build",
                "-G",
                "Ninja",
                "-DPACE_TESTS=ON",
                f"-DPACE_TABLES={';'.join(BUILT_TABLES)}",
            ]
            + [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
            + [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.folder / 'pace'}"],
            ["cmake", "--build", "build", "--parallel", str(len(os.sched_getaffinity(0)))],
        ):
            status, output = self.run(*command)
            assert status == 0, output[-8000:]
