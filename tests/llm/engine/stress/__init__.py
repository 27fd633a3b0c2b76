"""Random stress: several threads do random things to one engine with a small pool, and every token is checked.

    python -m tests.llm.engine.stress --seconds 600 [--world fake] [--seed 1]

What a request gives is compared with what it gives alone, in an engine of its own with a pool that holds everything; a
session's logits with those of its tokens in one piece. At the end nothing may be left in the engine: no sequence, no
block.

To stress something new, add a line to a table: `WORLDS` (how the engine is made), `CONFIGS` (what is asked of it) or
`ACTIONS` (what threads do).
"""

from __future__ import annotations

import faulthandler
import random
import threading
import time
import traceback
from collections.abc import Callable

from tests.llm.engine.stress.actions import ACTIONS
from tests.llm.engine.stress.engines import WORLDS
from tests.llm.engine.stress.world import Planted, World
from tests.llm.generators import check_idle

NUM_THREADS = 6
PATIENCE = 120.0
"""Seconds for what the caller still wants to see at the end, and then for what is under way."""


def run(
    name: str, seconds: float, seed: int, enough: Callable[[World], bool] = lambda world: True, num_prompts: int = 40
) -> World:
    """Stresses the world of that name for so long, and on a busy machine longer, until there is `enough`. Returns it with
    its counts. Raises AssertionError for anything wrong."""
    world, ended = World(*WORLDS[name](), num_prompts), threading.Event()
    shares = [list(ACTIONS)[index::NUM_THREADS] for index in range(NUM_THREADS)]
    threads = [
        threading.Thread(target=_work, args=(world, random.Random(f"{seed} {share}"), share, ended), daemon=True)
        for share in shares
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    while not world.errors and time.monotonic() - deadline < (0.0 if enough(world) else PATIENCE):
        time.sleep(0.05)
    ended.set()
    deadline = time.monotonic() + PATIENCE
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline and not world.errors:
        time.sleep(0.05)
    assert not world.errors, "\n".join(world.errors)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError("a thread does not come back: see the stacks above")
    check_idle(world.generator)
    assert not list(world.engine.scheduler.sequences())
    return world


def _work(world: World, chance: random.Random, first: list[Callable], ended: threading.Event) -> None:
    """Does the `first` actions, so that all are done by someone, and then random ones until it has `ended`."""
    while (first or not ended.is_set()) and not world.errors:
        action = first.pop() if first else chance.choices(list(ACTIONS), ACTIONS.values())[0]
        try:
            action(world, chance)
        except Planted:
            pass
        except BaseException:
            world.errors.append(f"{action.__name__}: {traceback.format_exc()}")
            return
        with world._lock:
            world.num_done[action.__name__] += 1
