"""Work on threads of its own, awaited on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_thread(function: Callable[[], Result], name: str = "pace-load") -> asyncio.Future[Result]:
    """Runs `function` on a daemon thread and returns a future of its result. Cancelling the future does not stop the
    thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def set_if_waiting(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            set_outcome, outcome = future.set_result, function()
        except BaseException as error:
            set_outcome, outcome = future.set_exception, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_if_waiting, set_outcome, outcome)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
