import pytest

pytest.register_assert_rewrite("tests.checkpoints.gguf.checks", "tests.checkpoints.gguf.projectors.files")
