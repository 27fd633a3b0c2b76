"""A minute of random stress, in parts that can run side by side; `python -m tests.llm.stress --seconds 600` does more."""

from __future__ import annotations

import pytest

from tests.llm import stress

SECONDS = 12.0
"""Of each world."""


@pytest.mark.parametrize("name", stress.WORLDS)
def test_random_stress_leaves_no_wrong_token_and_no_leaked_block(name: str) -> None:
    world = stress.run(name, SECONDS, seed=1)
    assert set(world.num_done) == {action.__name__ for action in stress.ACTIONS}, "everything was done at least once"
    assert world.num_tokens > 200
