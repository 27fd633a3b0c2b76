"""PACE_TABLES: the kernels of a build, refusals, and the error for an instruction set that was left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pace import _C

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

PROGRAM = """
#include <cstdio>
#include <stdexcept>
#include "pace/dispatch.h"
namespace pace::generic { extern const KernelTable kernel_table; const KernelTable kernel_table{.name = "generic"}; }
int main() {
    for (const char* name : {"generic", "emulated_amx", "avx3"}) try {
        pace::select_isa(name);
        std::printf("%s\\n", pace::kernels().name);
    } catch (const std::invalid_argument& error) {
        std::printf("%s\\n", error.what());
    }
}
"""


@pytest.fixture(scope="module")
def configure(tmp_path_factory):
    """`configure(tables)` returns CMake's exit status and output, with a trace of CMakeLists.txt."""
    if not shutil.which("cmake", path=PATH):
        pytest.skip("needs cmake and ninja: pip install pace-llm[test]")
    folder = tmp_path_factory.mktemp("build")

    def run(tables: str) -> tuple[int, str]:
        command = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DPACE_PYTHON=OFF", f"-DPACE_TABLES={tables}"]
        command += ["--trace-expand", "--trace-source=CMakeLists.txt"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": PATH}, timeout=120)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def test_tables_that_make_no_sense_are_refused(configure):
    status, said = configure("generic;avx3")
    assert (
        status == 1 and "PACE_TABLES: unknown table 'avx3'; use host, all, tests, or some of amx, avx512_bf16" in said
    )
    status, said = configure("avx2;avx512")
    assert status == 1 and "PACE_TABLES must include generic, which runs on every CPU; got 'avx2;avx512'" in said


def test_the_best_table_of_this_cpu_is_the_one_that_is_chosen(configure):
    """CMake and the dispatcher agree on the CPU features that each table needs."""
    status, said = configure("host")
    assert status == 0, said
    built = re.search(r"set\(PACE_BUILT_TABLES ([\w ;]+)\)", said)[1]
    assert set(built.replace(";", " ").split()) == {"generic", _C.best_isa()}


def test_an_instruction_set_that_was_left_out_says_how_to_have_it(tmp_path):
    """Builds the dispatcher with one table that has no kernels."""
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    sources = [tmp_path / "main.cpp", ROOT / "csrc/dispatch.cpp", *sorted((ROOT / "csrc").glob("cpu*.cpp"))]
    command = [compiler, "-std=c++20", "-I", ROOT / "csrc/include", *sources, "-o", tmp_path / "main"]
    subprocess.run(command, check=True, timeout=120)
    lines = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines == [
        "generic",
        (
            "instruction set 'emulated_amx' is not in this build of pace, which has: generic. Build it with "
            "PACE_TABLES=tests"
        ),
        "unknown instruction set 'avx3'; available: generic. Set PACE_ISA to one of them, or unset it to use the best",
    ]
