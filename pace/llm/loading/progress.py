"""A bar that shows the progress of long work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pace import env


@contextmanager
def progress_bar(total: int, title: str, wanted: bool, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the bytes (or other units) done, from any thread. It moves a bar on stderr, if a
    person can see it."""
    if not wanted or not env.shows_bars():
        yield lambda done: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, desc=title, unit=unit, unit_scale=True, leave=False) as bar:

        def report(done: int) -> None:
            with lock:
                bar.update(done)

        yield report
