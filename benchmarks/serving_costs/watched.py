"""`python -m benchmarks.serving_costs.watched serve ...`: the command `pace` with a monitor of its event loop.

SIGUSR1 starts the monitor. SIGUSR2 ends it and writes `lag: [...]` to stderr, the delay of each tick in seconds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from pace.cli import main

TICK_SECONDS = 0.005


async def beside_a_watcher(served: Coroutine[Any, Any, int]) -> int:
    loop, is_on, lags = asyncio.get_running_loop(), asyncio.Event(), []

    async def watch() -> None:
        while await is_on.wait():
            due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            lags.append(loop.time() - due)

    def end() -> None:
        is_on.clear()
        print(f"lag: {json.dumps(lags)}", file=sys.stderr, flush=True)
        lags.clear()

    loop.add_signal_handler(signal.SIGUSR1, is_on.set)
    loop.add_signal_handler(signal.SIGUSR2, end)
    watcher = asyncio.create_task(watch())
    try:
        return await served
    finally:
        watcher.cancel()


if __name__ == "__main__":
    run = asyncio.run
    asyncio.run = lambda served: run(beside_a_watcher(served))
    sys.exit(main())
