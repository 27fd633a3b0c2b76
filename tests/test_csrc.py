"""Builds the C++ tests and runs them: here, and where an emulator of other CPUs is at hand, on CPUs with and without AVX-512.

The emulator is `run_avx512` (PACE_RUN_AVX512, or ../shared/tools/run_avx512 beside the repository)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "tests"
EMULATOR = Path(os.environ.get("PACE_RUN_AVX512") or ROOT.parent / "shared" / "tools" / "run_avx512")
# Linear kernels and the vector wrapper; attention is too slow for an emulator, threads and forks need a real machine.
KERNEL_TESTS = ["compare", "dispatch", "linear", "epilogues", "weights", "activations", "vec", "scalar"]


def run(command: list[object], timeout: float = 600) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=os.environ | {"PATH": path},
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout[-8000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def binary() -> Path:
    if not shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        pytest.skip("needs cmake and ninja: pip install pace-llm[test]")
    run(["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DPACE_PYTHON=OFF", "-DPACE_TESTS=ON"])
    run(["cmake", "--build", BUILD, "--target", "pace_tests"])
    return BUILD / "pace_tests"


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("csrc")
def test_on_this_cpu(binary):
    assert "tests passed" in run([binary])


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("csrc")
def test_a_pattern_that_matches_nothing_is_a_failure(binary):
    assert subprocess.run([binary, "no such test"], stdout=subprocess.DEVNULL).returncode != 0


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("csrc")
@pytest.mark.parametrize(
    "cpu, best, tables",
    [
        ("corei7_icelake_u", "avx512_vnni", "avx512_vnni avx512 avx2 generic"),
        ("corei7_haswell_4770", "avx2", "avx2 generic"),
    ],
)
def test_on_emulated_cpus(binary, cpu, best, tables):
    """Each table's instructions on a CPU that has them, and on none that lacks them: one wide instruction too many ends the run."""
    if not EMULATOR.exists():
        pytest.skip(f"no emulator at {EMULATOR.name}; set PACE_RUN_AVX512")
    output = run([EMULATOR, "--timeout", 800, "--cpu", cpu, binary, *KERNEL_TESTS], timeout=850)
    assert f"chosen {best}; tables: {tables} emulated_avx512_bf16 emulated_amx" in output.replace("\r", "")
