"""What all models of a server share: `Shared`."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pace.server.metrics import ServerMetrics
from pace.server.network.fetch import Fetcher
from pace.server.network.http import LargeBodies
from pace.server.options import ServeOptions
from pace.server.workers import MediaWorkers

WORKERS = 2
"""Threads that render templates and tokenise."""


class Shared:
    """Workers, and bounds on the requests of all models together. Used on the event loop."""

    def __init__(self, options: ServeOptions) -> None:
        limits = options.limits
        self.metrics = ServerMetrics(options.metrics_prefix)
        self.workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="pace-prompts")
        self.media_workers = MediaWorkers(limits)
        self.large_bodies = LargeBodies(limits.body_bytes, limits.large_body_bytes, self.metrics.rejected)
        self.fetcher: Fetcher | None = None
        if options.media_hosts:
            self.fetcher = Fetcher(options.media_hosts, limits.media_bytes, limits.media_body_bytes)
        self.requests_of_key: Counter[str] = Counter()
        """Requests of each key in progress."""

    async def work(self, function: Any, *arguments: Any, **fields: Any) -> Any:
        """Returns the result of `function`, run by a worker."""
        call = functools.partial(function, *arguments, **fields)
        return await asyncio.get_running_loop().run_in_executor(self.workers, call)

    def close(self) -> None:
        self.workers.shutdown(wait=False, cancel_futures=True)
        self.media_workers.close()
        if self.fetcher is not None:
            self.fetcher.close()
