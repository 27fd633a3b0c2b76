"""The recipes of CONTRIBUTING.md: their steps add a toy to a copy of the sources, and the tests that they name cover
it."""

from __future__ import annotations

import re
import sys

import pytest

from tests.project.recipes import toy_model, toy_operation, toy_setting
from tests.project.recipes.copied_sources import BUILT_TABLES, ROOT, Copy

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path / "copy")


def paths_of(heading: str) -> set[str]:
    """Files named in the numbered steps of a recipe."""
    section = re.search(rf"^## {heading}\n(.*?)^## ", CONTRIBUTING, re.MULTILINE | re.DOTALL)[1]
    steps = "".join(re.findall(r"^\d\..*(?:\n   .*)*", section, re.MULTILINE))
    return set(re.findall(r"`((?:pace|csrc|tests|docs)/[^`]+\.\w+)`", steps))


def num_passed(output: str) -> int:
    """Number of passed tests, including separately counted parts of tests."""
    return sum(map(int, re.findall(r"(\d+)(?: subtests)? passed", output)))


ROWS = "tests/project/test_pages.py::test_every_model_has_a_row"
ORACLE = "tests/llm/models/test_oracle.py"


def test_a_model(copy):
    toy_model.add(copy)
    toy_model.add_row(copy)
    assert {path.replace("seed_oss", "<name>") for path in copy.touched} == paths_of("A model")
    layering = "tests/project/test_layering.py"
    status, output = copy.pytest(ROWS, ORACLE, layering, "-k", "row or seed_oss or imports_go_down")
    assert status == 0 and num_passed(output) > 20, output


@pytest.mark.thorough
def test_a_model_that_is_wrong_and_has_no_row(copy):
    """The comparison with `transformers` covers a new model that has only its tuple."""
    toy_model.add(copy, "    gate_up_names = ('up_proj', 'gate_proj')\n")
    status, output = copy.pytest(ROWS, ORACLE, "-k", "row or seed_oss")
    assert status == 1 and "SeedOssForCausalLM" in output and "relative_error" in output, output


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_kernel(copy):
    """Adds an operation from its kernel to its instruction, and a setting of attention. The tests of all operations
    check their contracts. The build has three tables, and errors for other tables name them."""
    toy_operation.add(copy)
    of_setting = toy_setting.add(copy)
    assert of_setting == paths_of("A new argument of an op") and len(of_setting) <= 6
    copy.build("test_hinge.cpp")
    status, output = copy.run("build/pace_tests", "hinge")
    assert status == 0 and f"kernels tested: {' '.join(BUILT_TABLES)}" in output, output
    toys = ["tests/ops/test_hinge.py", "tests/ops/test_gain.py"]
    status, output = copy.pytest(*toys, "tests/ops/test_protocol.py", "tests/project/test_stub.py")
    assert status == 0 and num_passed(output) > 5, output
    absent = "from pace import _C; print(sorted(_C.built_isas())); _C.select_isa('emulated_amx')"
    status, output = copy.run(sys.executable, "-c", absent)
    assert status == 1 and str(BUILT_TABLES) in output and "Build it with PACE_TABLES=tests" in output, output
    assert not [path for path in paths_of("A kernel") if path not in copy.touched and "test" not in path]
