"""Random stress test until enough has happened. `python -m tests.llm.engine.stress --seconds 600` runs longer."""

from __future__ import annotations

import pytest

from pace.llm.engine.drafter import NoDraft
from tests.llm.engine import stress
from tests.plugins.tiers import sample

ALWAYS = ("draft model", "bmc", "windows", "int8", "states")
"""Worlds that together cover all kinds of caches, drafts and models."""


def saw_enough(world: stress.World) -> bool:
    """True after 200 tokens, a preemption, and an accepted draft if the world has drafts."""
    has_drafts = type(world.engine.drafter) is not NoDraft
    return bool(
        world.num_tokens > 200
        and world.happened["num_preemptions"]
        and bool(world.happened["num_accepted_tokens"]) == has_drafts
    )


@pytest.mark.parametrize("seconds", [0.5, pytest.param(9.0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", sample(list(stress.WORLDS), lambda name: name in ALWAYS))
def test_random_stress_leaves_no_wrong_token_and_no_leaked_block(name: str, seconds: float) -> None:
    """Runs for at least `seconds`, longer on a slow machine."""
    world = stress.run(name, seconds, seed=1, enough=saw_enough, num_prompts=12)
    assert set(world.num_done) == {action.__name__ for action in stress.ACTIONS}, "everything was done at least once"
    assert saw_enough(world), f"{world.num_tokens} tokens, {world.happened}"
