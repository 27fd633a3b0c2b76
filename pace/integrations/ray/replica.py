"""A replica: one engine with the application of `pace serve`, in an actor."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from pace.integrations.ray.threads import assigned_threads
from pace.llm.loading.options import LoadOptions
from pace.server.app import make_app
from pace.server.models.pool import ModelPool
from pace.server.network.http import Receive, Scope
from pace.server.network.run import SWITCH_SECONDS
from pace.server.options import ServeOptions
from pace.server.service import Service

GONE_SECONDS = 5.0
"""Time for an answer to end after its client disconnects."""

Message = dict[str, Any]
"""An ASGI message."""


class Replica:
    """Loads a model with one thread per CPU that Ray reserved for it, and answers requests that passed `Gate`."""

    def __init__(self, options: ServeOptions, load: dict[str, Any]) -> None:
        """`load`: fields of LoadOptions. Raises if the model cannot be loaded."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._service = Service(options, LoadOptions(**load, num_threads=assigned_threads(), progress=False))
        self._service.load()
        self._pool = ModelPool.of(self._service)
        self._app = make_app(self._pool)
        gc.freeze()  # collections skip the loaded objects

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message | None]:
        """Yields None once the request has arrived, then the messages of its answer. A message is made when the
        previous one has been taken, so that a slow reader gets fewer and larger ones. Closing the iterator cancels
        the request."""
        yield None
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        task = asyncio.create_task(self._run(scope, body, messages, gone))
        try:
            while (message := await messages.get()) is not None:
                yield message
                messages.task_done()
            await task
        finally:
            gone.set()
            if not task.done():
                await asyncio.wait({task}, timeout=GONE_SECONDS)
                task.cancel()

    async def _run(self, scope: Scope, body: bytes, messages: asyncio.Queue, gone: asyncio.Event) -> None:
        async def send(message: Message) -> None:
            await messages.join()
            messages.put_nowait(message)

        try:
            await self._app(scope, _receiver(body, gone), send)
        finally:
            messages.put_nowait(None)

    async def metrics(self) -> tuple[str, str]:
        """Returns the name of this replica and its Prometheus page."""
        return serve.get_replica_context().replica_id.unique_id, self._pool.render_metrics().decode()

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed: Ray then starts another replica."""
        if (why := self._service.why_unwell) is not None:
            raise RuntimeError(why)

    def __del__(self) -> None:
        """Called by Ray after running requests have ended or timed out."""
        if service := getattr(self, "_service", None):
            service.close()


def _receiver(body: bytes, gone: asyncio.Event) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive
