import pytest

pytest.register_assert_rewrite("tests.llm.models.visit", "tests.llm.models.towers.checks")
