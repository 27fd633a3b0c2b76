import pytest

pytest.register_assert_rewrite("tests.llm.processors.images.comparing")
