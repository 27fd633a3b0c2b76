"""What both kinds of models for an event loop have in common: `ModelService`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pace.llm.engine.driver import StepDriver
from pace.llm.engine.turns import NO_TURNS
from pace.server.adapters.served import ServedAdapters
from pace.server.admission import Admission
from pace.server.errors import LOADING, ApiError
from pace.server.models.shared import Shared
from pace.server.options import ServeOptions
from pace.server.prompts import PromptReader

STALL_SECONDS = 60.0
"""A step that takes longer counts as stuck: the machine sleeps, or something hangs."""
WHY_NOT = {
    "loading": LOADING,
    "reloading": LOADING,
    "draining": "the server is shutting down",
    "unloaded": "the model is not loaded; the next request for it loads it",
}
"""Status of a model -> why it cannot answer."""


class ModelService:
    """The common part of a `HostedModel`: its status, its place in the queue and its workers. A subclass defines
    `_open`, `driver` and `loaded`."""

    driver: StepDriver | None
    """Steps the loaded model; None without one."""
    loaded: Any
    """The loaded model. Raises ApiError 503 before it is loaded, and during shutdown."""

    def __init__(self, options: ServeOptions, shared: Shared | None) -> None:
        """`shared` has the workers of a pool; by default, the model has its own."""
        self.options = options
        self.limits = options.limits
        self.status = "loading"
        self.started = int(time.time())
        self.shared = shared or Shared(options)
        self.reader: PromptReader | None = None
        """Reads prompts and the requests of the tokenizer; None while the model is not loaded."""
        self.admission: Admission | None = None
        self.max_length: int | None = None
        """Maximum number of tokens of a sequence; None until the model was loaded once."""
        self.adapters = ServedAdapters(options)
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks that `drain` cancels."""
        self._turns: AbstractContextManager[None] = NO_TURNS

    def use_turns(self, turns: AbstractContextManager[None]) -> None:
        """Steps the model only in its turns, from the next `load` on."""
        self._turns = turns

    def load(self) -> None:
        """Loads the model, also again after `unload`. Raises the errors of loading."""
        try:
            self._open()
        except BaseException:
            self.status = "failed"
            raise

    def _open(self) -> None:
        """Opens the model, and serves it. Raises the errors of loading."""
        raise NotImplementedError

    def open_queue(self, max_running: int) -> None:
        """Makes the queue of requests, once."""
        if self.admission is None:
            shared = self.shared
            self.admission = Admission(self.limits, max_running, shared.metrics.rejected, shared.requests_of_key)

    @property
    def why_unwell(self) -> str | None:
        """Reason why nothing can be answered any more, or why a step is stuck; None if all is well."""
        if self.status == "failed":
            return "the model could not be loaded"
        return None if self.driver is None else why_unwell(self.driver)

    def check_ready(self) -> None:
        """Raises ApiError 503 before the model is loaded, and during shutdown."""
        _ = self.loaded

    def not_ready(self) -> ApiError:
        """Returns the error for a request before the model is loaded, or during shutdown."""
        return ApiError(503, WHY_NOT.get(self.status, "the model could not be loaded"), headers={"retry-after": "5"})

    def check_room(self) -> None:
        """Raises ApiError 429 if the queue has no room for any request."""
        if self.admission is not None:
            self.admission.check_room()

    def check_priority(self, priority: int) -> None:
        """Raises ApiError 400 for a priority that the server does not allow."""
        if priority and not self.options.allow_priority:
            message = "priority is disabled here (start the server with --allow-priority); leave it out, or send 0"
            raise ApiError(400, message, param="priority")

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Lets `drain` cancel the block, which then raises ApiError 503."""
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.status == "draining" and not task.uncancel():
                raise self.not_ready() from None
            raise
        finally:
            self._tasks.discard(task)

    async def work(self, function: Any, *arguments: Any) -> Any:
        """Returns the result of `function`, run by a worker."""
        return await self.shared.work(function, *arguments)


def why_unwell(driver: StepDriver) -> str | None:
    """Returns why a driver does no more work, or why its step is stuck; None if all is well."""
    try:
        _ = driver.engine
    except (RuntimeError, ValueError) as error:
        return str(error)
    seconds = 0.0 if driver.stepping_since is None else time.perf_counter() - driver.stepping_since
    return f"a step has taken {seconds:.0f} s so far" if seconds > STALL_SECONDS else None
