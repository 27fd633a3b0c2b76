"""docs/faults.md names tests that exist, for each fault of the list."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "faults.md"
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)


def exists(name: str) -> bool:
    """True if `folder/module::test`, below tests/server or below tests, is a test."""
    module, _, test = name.partition("::")
    files = [folder / f"{module}.py" for folder in (TESTS / "server", TESTS)]
    source = next((file.read_text() for file in files if file.exists()), "")
    return re.search(rf"^(async )?def {test}\(", source, re.MULTILINE) is not None


def test_every_fault_has_tests_that_exist():
    rows = ROW.findall(PAGE.read_text())
    assert [int(number) for number, _, _ in rows] == list(range(1, 69))
    for number, _, tests in rows:
        names = re.findall(r"`([^`]+)`", tests)
        assert names and all(map(exists, names)), (number, [name for name in names if not exists(name)])


def test_a_test_that_is_not_there_is_found_missing():
    assert exists("faults/test_faults::test_null_is_the_default")
    assert not exists("faults/test_faults::test_null_is") and not exists("test_nothing::test_null_is_the_default")
