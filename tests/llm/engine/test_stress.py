"""A minute of random stress, in parts that can run side by side; `python -m tests.llm.engine.stress --seconds 600` does
more."""

from __future__ import annotations

import pytest

from pace.llm.engine.drafter import NoDraft
from tests.llm.engine import stress

SECONDS = 9.0
"""Of each world."""


@pytest.mark.parametrize("name", stress.WORLDS)
def test_random_stress_leaves_no_wrong_token_and_no_leaked_block(name: str) -> None:
    world = stress.run(name, SECONDS, seed=1)
    assert set(world.num_done) == {action.__name__ for action in stress.ACTIONS}, "everything was done at least once"
    assert world.num_tokens > 200 and world.happened["num_preemptions"]
    assert bool(world.happened["num_accepted_tokens"]) == (type(world.engine.drafter) is not NoDraft)
