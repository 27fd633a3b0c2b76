"""Builds the C++ tests and runs them on this CPU and, if an emulator of other CPUs is available, for each instruction
set.

The emulator is `run_avx512` (PACE_RUN_AVX512, or ../shared/tools/run_avx512 next to the repository). It has no
AVX512_BF16 and no AMX: those tables are tested on CPUs that have them, and everywhere as plain C++ (the tables
emulated_*)."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.tiers import QUARTERS, quarter

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "cmake"
"""Build folder of setup.py, in which the kernels are compiled already."""
EMULATOR = Path(os.environ.get("PACE_RUN_AVX512") or ROOT.parent / "shared" / "tools" / "run_avx512")
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

# The smallest emulated CPU that has the instructions of each table: any other instruction ends the run.
LEAST_CPUS = {
    "generic": [
        "--cpu",
        "phenom_8650_toliman",
        "--plain-boot",
    ],  # SSE4a and no VEX encoding; no XSAVE for a saved state
    "avx2": ["--cpu", "corei7_haswell_4770"],
    "avx512": ["--cpu", "corei7_skylake_x"],
    "avx512_vnni": ["--cpu", "corei7_icelake_u"],
}
EMULATE_ALL = bool(os.environ.get("PACE_EMULATE_ALL"))
DEAR = {
    "products_of_super_blocks_have_the_bits_of_their_definition",
    "products_with_points_of_grids_have_the_bits_of_their_definition",
    "quantized_products_over_several_blocks_of_k",
    "a_decode_step_is_the_same_for_every_number_of_threads",
    "quantized_products_with_extreme_scales_and_groups_of_zeros",
    "steps_of_several_spans_are_the_same_for_every_number_of_threads",
    "steps_up_to_newest_positions_are_the_same_for_every_number_of_threads",
    "attention_of_all_shapes_is_close_and_the_same_in_every_cut",
    "attention_split_by_partition_is_the_same",
    "products_touch_nothing_behind_their_arguments",
    "quantized_products_of_many_panels_and_rows",
}
"""Tests that take three quarters of the time, and whose kernels other tests also run. Only `make emulate` runs them on
emulated CPUs."""
VNNI_IN_EVEX = "avx2_vnni_evex"  # the kernels of avx2_vnni, for which the emulator has no CPU
# Bochs 2.7 reports POPCNT (151) for the Phenom but does not execute it.
HIDDEN_FEATURES = {"generic": {"RUN_AVX512_CLEARCPUID": "151"}}

pytestmark = pytest.mark.timeout(900)


def run(*command: object, status: int = 0, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT | environment,
    )
    assert result.returncode == status, f"{command} ended with {result.returncode}:\n{result.stdout[-8000:]}"
    return result.stdout.replace("\r", "")


@pytest.fixture(scope="module")
def binary() -> Path:
    """Path of the C++ test program. Make builds it with the extension; otherwise it is built here."""
    if not shutil.which("cmake", path=ENVIRONMENT["PATH"]):
        pytest.skip("needs cmake and ninja: pip install pace-llm[test]")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # setup.py also builds in this folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not (BUILD / "CMakeCache.txt").exists()
        # An extension that pip built leaves the path of a temporary ninja, which no longer exists.
        generator = ("-G", "Ninja", "-DPACE_PYTHON=OFF") if is_new else ("-U", "CMAKE_MAKE_PROGRAM")
        run("cmake", "-S", ROOT, "-B", BUILD, "-DPACE_TESTS=ON", *generator)
        run("cmake", "--build", BUILD, "--target", "pace_tests")
    return BUILD / "pace_tests"


@pytest.fixture(scope="module")
def emulator() -> Path:
    if not EMULATOR.exists():
        pytest.skip(f"no emulator at {EMULATOR}; set PACE_RUN_AVX512")
    prepared = subprocess.run([EMULATOR, "--setup"], capture_output=True, text=True)
    if prepared.returncode != 0:
        pytest.skip(f"{EMULATOR.name} cannot be prepared here: {prepared.stderr.strip()}")
    return EMULATOR


def names_of(macro: str) -> set[str]:
    """Names of the C++ tests that `TEST` or `TEST_TABLES` defines."""
    files = (ROOT / "tests/csrc").glob("*.cpp")
    return {name for file in files for name in re.findall(rf"^{macro}\((\w+)", file.read_text(), re.M)}


@pytest.mark.thorough
def test_on_this_cpu(binary):
    assert f"{len(names_of('TEST') | names_of('TEST_TABLES'))} tests passed" in run(binary)


def test_on_this_cpu_and_a_quarter_of_its_tables(binary):
    """The expensive tests run on the chosen table and on a quarter of the others, which differs by commit. The rest run
    on all tables."""
    others = (names_of("TEST") | names_of("TEST_TABLES")) - DEAR
    output = run(binary, *sorted(others))
    assert f"{len(others)} tests passed" in output
    best, *tables = re.search(r"tables: (.*)", output)[1].split()
    wanted = [best, *tables[quarter() :: QUARTERS]]
    output = run(binary, "--tables", ",".join(wanted), *sorted(DEAR))
    assert f"{len(DEAR)} tests passed; kernels tested: {' '.join(sorted(wanted))}\n" in output


def test_a_pattern_that_matches_nothing_is_a_failure(binary):
    run(binary, "no such test", status=1)


def test_a_table_that_cannot_be_had_is_refused(binary):
    assert "unknown instruction set 'avx3'" in run(binary, "--tables", "generic,avx3", status=2)


@pytest.mark.thorough
@pytest.mark.parametrize("table", [*LEAST_CPUS, VNNI_IN_EVEX])
def test_kernels_on_the_least_cpu(binary, emulator, table):
    least = "avx512_vnni" if table == VNNI_IN_EVEX else table
    names = names_of("TEST_TABLES")
    assert DEAR <= names
    wanted = sorted(names if EMULATE_ALL else names - DEAR)
    command = [emulator, "--timeout", 800, *LEAST_CPUS[least], binary, "--tables", table, *wanted]
    output = run(*command, **HIDDEN_FEATURES.get(table, {}))
    # This CPU has the table but none above it, and every requested test ran on it.
    tables = list(LEAST_CPUS)
    below = [*reversed(tables[: tables.index(least) + 1]), *[VNNI_IN_EVEX] * (least == "avx512_vnni")]
    assert f"chosen {least}; tables: {' '.join(below)} emulated_avx512_bf16 emulated_amx\n" in output
    assert f"{len(wanted)} of {len(wanted)} tests passed; kernels tested: {table}\n" in output


@pytest.mark.thorough
def test_a_table_that_this_cpu_lacks_is_refused(binary, emulator):
    output = run(emulator, *LEAST_CPUS["avx2"], binary, "--tables", "avx2,avx512", status=2)
    assert "instruction set 'avx512' is not available on this CPU" in output
