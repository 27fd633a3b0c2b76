"""The recipes of CONTRIBUTING.md: a toy is added by their steps to a copy of the sources, and the tests that they name
cover it there."""

from __future__ import annotations

import re

import pytest

from tests.project import toy_model, toy_operation
from tests.project.copied_sources import BUILT_TABLES, ROOT, Copy

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path / "copy")


def paths_of(heading: str) -> set[str]:
    """Files that the numbered steps of a recipe name."""
    section = re.search(rf"^## {heading}\n(.*?)^## ", CONTRIBUTING, re.MULTILINE | re.DOTALL)[1]
    steps = "".join(re.findall(r"^\d\..*(?:\n   .*)*", section, re.MULTILINE))
    return set(re.findall(r"`((?:pace|csrc|tests|docs)/[^`]+\.\w+)`", steps))


def num_passed(output: str) -> int:
    return int((re.search(r"(\d+) passed", output) or [0, 0])[1])


def test_a_model(copy):
    toy_model.add(copy)
    list_of_models = "tests/project/test_pages.py::test_every_model_has_a_row"
    status, output = copy.pytest(list_of_models)
    assert status == 1 and "SeedOssForCausalLM" in output, "a model without its row is noticed"
    toy_model.add_row(copy)
    assert {path.replace("seed_oss", "<name>") for path in copy.touched} == paths_of("A model")
    status, output = copy.pytest(
        list_of_models,
        "tests/project/test_layering.py",
        "tests/llm/models/test_oracle.py",
        "tests/llm/runners/test_program.py",
        "-k",
        "row or seed_oss",
    )
    assert status == 0 and num_passed(output) > 10, output


def test_a_model_that_is_wrong(copy):
    """The comparison with `transformers` covers a new model with nothing but its tuple."""
    toy_model.add(copy, "    gate_up_names = ('up_proj', 'gate_proj')\n")
    status, output = copy.pytest("tests/llm/models/test_oracle.py", "-k", "seed_oss and test_float32_logits")
    assert status == 1 and "relative_error" in output, output


@pytest.mark.timeout(900)
def test_a_kernel(copy):
    """An operation from its kernel to its instruction. What it promises is held to by the tests of all operations."""
    toy_operation.add(copy)
    copy.build("test_hinge.cpp")
    status, output = copy.run("build/pace_tests", "hinge")
    assert status == 0 and f"kernels tested: {' '.join(sorted(BUILT_TABLES))}" in output, output
    status, output = copy.pytest("tests/ops/test_hinge.py", "tests/ops/test_protocol.py", "tests/project/test_stub.py")
    assert status == 0 and num_passed(output) > 5, output
    assert not [path for path in paths_of("A kernel") if path not in copy.touched and "test" not in path]
