import pytest

pytest.register_assert_rewrite("tests.llm.models.visit")
