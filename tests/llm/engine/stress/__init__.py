"""Random stress test: several threads do random things to one engine with a small pool, and every token is checked.

    python -m tests.llm.engine.stress --seconds 600 [--world fake] [--seed 1]

The output of a request is compared with its output from a second engine, where it runs alone with a pool that holds
everything. A session's logits are compared with those of its tokens in one piece. At the end no sequence and no block
may be left in the engine.

To stress something new, add a line to a table. `WORLDS` makes the engines, `CONFIGS` holds the sampling settings, and
`ACTIONS` lists the actions of threads.
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
"""Longest extra time in seconds until `enough` holds, and then until the threads end."""


def run(
    name: str, seconds: float, seed: int, enough: Callable[[World], bool] = lambda world: True, num_prompts: int = 40
) -> World:
    """Stresses the named world for `seconds`, or on a busy machine longer, until `enough(world)` is true. Returns the
    world with its counts. Raises AssertionError if anything is wrong."""
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
    """Does the `first` actions, so that each action is done by some thread, then random ones until `ended` is set."""
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
