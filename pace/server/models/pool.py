"""The models of a server, by name: `ModelPool`."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pace.llm.engine.tracebacks import forget_engine_frames
from pace.llm.engine.turns import StepTurns
from pace.memory import give_back_memory
from pace.server.errors import LOADING, ApiError, NotWell, invalid, not_served
from pace.server.models.base import WHY_NOT
from pace.server.models.hosted import HostedModel
from pace.server.models.shared import Shared
from pace.server.network.threads import in_thread
from pace.server.options import ModelEntry, ServeOptions

logger = logging.getLogger("pace")

RETRY_SECONDS = 30.0
"""Time after a failed load in which requests are refused with its reason; the next one then tries again."""


@dataclass(eq=False)
class Slot:
    """A model, and who uses it."""

    model: HostedModel
    entry: ModelEntry
    num_users: int = 0
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None
    """The last unload."""
    load_began: float = 0.0
    load_seconds: float = 5.0
    """Time that the last load took."""
    properties: dict[str, Any] | None = None
    """The last answer of `/props`."""
    idle_clock: asyncio.TimerHandle | None = None
    why_failed: str | None = None
    """The reason of a failed load, until the next one."""
    failed_at: float = 0.0


class ModelPool:
    """Finds the model of a request, loads it if needed, and unloads models that are idle.

    An endpoint gets the model from the pool, and `scope["app"].state.pool` is the pool:

        async with pool.use(request.model) as model:     # 404, or waits for a load, or 503
            ...                                          # the model stays loaded until the block ends

    Used on the event loop only. Loads and unloads run on a thread, one after the other.
    """

    def __init__(self, options: ServeOptions, models: Sequence[HostedModel], shared: Shared) -> None:
        """`models` are those of `options.entries`. The first one for a task answers its requests without a name."""
        self.options = options
        self.limits = options.limits
        self.shared = shared
        self.metrics = shared.metrics
        self.is_draining = False
        self._num_threads = 0
        """Threads that load or unload: one, or more after a drain, which does not wait for them."""
        self._slots = [Slot(model, entry) for model, entry in zip(models, options.entries, strict=True)]
        self._changes = asyncio.Lock()
        self._new_names: set[str] = set()
        """Names of adapters that are being loaded."""
        if len(models) > 1:
            turns = StepTurns()
            for model in models:
                model.use_turns(turns)

    @classmethod
    def make(cls, options: ServeOptions, make_model: Callable[[ModelEntry, Shared], HostedModel]) -> ModelPool:
        """Makes the models of `options.entries`, without loading them."""
        shared = Shared(options)
        return cls(options, [make_model(entry, shared) for entry in options.entries], shared)

    @classmethod
    def of(cls, model: Any) -> ModelPool:
        """Returns the pool of one model, which may be loaded: a `HostedModel` with `options` and `shared`."""
        return cls(model.options, [model], model.shared)

    # -- models by name ------------------------------------------------------------------------------------------------

    @property
    def models(self) -> list[HostedModel]:
        return [slot.model for slot in self._slots]

    @property
    def names(self) -> list[str]:
        """Names of all models."""
        return [name for model in self.models for name in model.names]

    def find(self, name: str | None, task: str | None = None) -> HostedModel:
        """Returns the model of a name, loaded or not. Without a name, it is the first that is for the task, or else the
        first of all. Raises ApiError 404."""
        return self._slot(name, task).model

    def _slot(self, name: str | None, task: str | None = None) -> Slot:
        if name is None:
            return next((slot for slot in self._slots if slot.model.task == task), self._slots[0])
        if len(name) > self.limits.name_characters:
            raise invalid("model", f"must have at most {self.limits.name_characters} characters")
        if (found := next((slot for slot in self._slots if name in slot.model.names), None)) is not None:
            return found
        if self.options.any_model_name:
            return self._slots[0]
        raise not_served(name, self.names)

    @contextmanager
    def new_name(self, name: str) -> Iterator[None]:
        """Keeps a name for an adapter that the block loads. Raises ApiError 409 if a model or an adapter has it."""
        if name in self._new_names or name in self.names:
            message = f"the name {name!r} is taken by a model or an adapter"
            raise ApiError(409, message, param="name", code="name_taken")
        self._new_names.add(name)
        try:
            yield
        finally:
            self._new_names.discard(name)

    def described(self, name: str, model: HostedModel) -> dict[str, Any]:
        """Returns the entry of `/v1/models` for one name of a model."""
        entry = {"id": name, "object": "model", "created": model.started, "owned_by": "pace", "root": name}
        own = next(slot.entry.names for slot in self._slots if slot.model is model)
        if name not in own and name in model.names:  # an adapter
            entry["parent"] = own[0]
        return entry | model.described | {"loaded": model.status in ("ready", "draining")}

    async def properties(self, name: str | None) -> dict[str, Any]:
        """Returns the answer of `/props` for a model. One that is not loaded gives its last answer. Raises ApiError."""
        slot = self._slot(name)
        has_last = lambda: slot.properties is not None and slot.model.status in ("unloaded", "reloading")
        if not has_last():
            try:
                slot.properties = await self.shared.work(slot.model.properties)
            except ApiError:
                if not has_last():  # it was not unloaded meanwhile
                    raise
        return slot.properties

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request's body, for the model that takes the largest."""
        return max(model.max_body_bytes for model in self.models)

    def check_room(self) -> None:
        """Raises ApiError 429 if no model has room for a request, before anything is done for it."""
        *others, last = self.models
        for model in others:
            try:
                return model.check_room()
            except ApiError:
                continue
        last.check_room()

    # -- use -----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, name: str | None, task: str | None = None) -> AsyncIterator[HostedModel]:
        """Yields the model that `find` returns, loaded, and keeps it loaded until the block ends.

        Waits for a load up to `max_wait` seconds. Raises ApiError 404 for an unknown name. Raises 503 if the model is
        not loaded by then, if it cannot be loaded, or if the server shuts down."""
        slot = self._slot(name, task)
        slot.num_users += 1
        self._stop_clock(slot)
        try:
            await self._wait_for(slot)
            yield slot.model
        finally:
            slot.num_users -= 1
            self._start_clock(slot)

    async def _wait_for(self, slot: Slot) -> None:
        """Returns when the model is loaded; begins that if needed. A model that is not well refuses requests itself."""
        if slot.loading is None and not self.is_draining:
            may_retry = slot.why_failed is not None and time.monotonic() > slot.failed_at + RETRY_SECONDS
            if slot.model.status == "unloaded" or may_retry:
                self._begin_load(slot, "reloading")
        deadline = time.monotonic() + self.limits.max_wait
        while slot.loading is not None:
            done, _ = await asyncio.wait({slot.loading}, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise self._still_loading(slot)
        if self.is_draining:
            raise ApiError(503, WHY_NOT["draining"], headers={"retry-after": "5"})
        if slot.why_failed is not None:
            left = max(1, math.ceil(slot.failed_at + RETRY_SECONDS - time.monotonic()))
            message = f"the model {slot.model.names[0]!r} could not be loaded: {slot.why_failed}"
            raise ApiError(503, message, headers={"retry-after": str(left)})

    def _still_loading(self, slot: Slot) -> ApiError:
        seconds = max(1, math.ceil(slot.load_began + slot.load_seconds - time.monotonic()))
        message = f"{LOADING}: {slot.model.names[0]!r} was not ready after {self.limits.max_wait:g} s; try again"
        return ApiError(503, f"{message} in {seconds} s", headers={"retry-after": str(seconds)})

    # -- loading and unloading -----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Loads the models, in order. Of several, one that cannot be loaded answers 503. Raises the error of loading
        the only one, or RuntimeError if none could be loaded."""
        gc.freeze()  # garbage collections, for which all threads wait, skip what was imported, and models that stay
        for slot in self._slots:
            if slot.entry.load_on_startup:
                self._begin_load(slot, "loading")
            else:
                slot.model.status = "unloaded"
        await asyncio.gather(*(slot.loading for slot in self._slots if slot.loading is not None))
        reasons = [f"{slot.model.names[0]}: {slot.why_failed}" for slot in self._slots if slot.why_failed is not None]
        if len(reasons) == len(self._slots):
            raise RuntimeError(f"none of the models could be loaded; {'; '.join(reasons)}")

    def _begin_load(self, slot: Slot, status: str) -> None:
        slot.model.status, slot.why_failed, slot.load_began = status, None, time.monotonic()
        slot.loading = asyncio.ensure_future(self._load(slot))

    async def _load(self, slot: Slot) -> None:
        is_only_start = slot.model.status == "loading" and len(self._slots) == 1
        try:
            async with self._changes:
                slot.load_began = time.monotonic()
                await self._change(slot.model.load)
            if slot.entry.idle_unload is None:
                gc.freeze()
            if slot.entry.idle_unload is not None:
                with suppress(Exception):  # the same error answers /props
                    slot.properties = await self.shared.work(slot.model.properties)
            slot.load_seconds = time.monotonic() - slot.load_began
        except Exception as error:
            slot.model.status, slot.failed_at = "failed", time.monotonic()
            slot.why_failed = _without_folders(str(error) or type(error).__name__)
            forget_engine_frames(error)  # they hold what was loaded so far
            if is_only_start:
                raise
            logger.warning("the model %r could not be loaded: %s", slot.model.names[0], error)
        finally:
            slot.loading = None
            self._start_clock(slot)

    async def _unload(self, slot: Slot) -> None:
        async with self._changes:  # before any load that begins later
            await self._change(slot.model.unload)

    async def _change(self, change: Callable[[], None]) -> None:
        """Runs a load or an unload on a thread."""

        def work() -> None:
            try:
                change()
            finally:
                gc.collect()
                give_back_memory()

        self._num_threads += 1
        thread = in_thread(work)
        try:
            await thread
        finally:
            self._num_threads -= not thread.cancelled()

    def _start_clock(self, slot: Slot) -> None:
        """Unloads the model after its idle time, unless it is used before."""
        seconds = slot.entry.idle_unload
        if seconds is not None and not slot.num_users and slot.model.status == "ready" and not self.is_draining:
            self._stop_clock(slot)
            slot.idle_clock = asyncio.get_running_loop().call_later(seconds, self._begin_unload, slot)

    def _stop_clock(self, slot: Slot) -> None:
        if slot.idle_clock is not None:
            slot.idle_clock.cancel()
            slot.idle_clock = None

    def _begin_unload(self, slot: Slot) -> None:
        slot.model.status = "unloaded"
        slot.unloading = asyncio.ensure_future(self._unload(slot))

    # -- health and the end --------------------------------------------------------------------------------------------

    def check_well(self) -> None:
        """Raises NotWell before the models are loaded for the first time, if none could be loaded, and if an engine has
        ended or is stuck. A draining server is well."""
        if any(model.status == "loading" for model in self.models):
            raise NotWell("loading", LOADING)
        failed = [model for model in self.models if model.status == "failed"]
        if len(failed) == len(self._slots):
            raise NotWell("failed", failed[0].why_unwell or WHY_NOT["unloaded"])
        for model in self.models:
            if model.status != "failed" and (why := model.why_unwell) is not None:
                raise NotWell("unwell", why)

    def check_ready(self) -> None:
        """Raises ApiError 503 if `/health` does, and during shutdown."""
        self.check_well()
        if self.is_draining or any(model.status == "draining" for model in self.models):
            raise ApiError(503, WHY_NOT["draining"], headers={"retry-after": "5"})

    @property
    def is_loading(self) -> bool:
        """True while a thread loads or unloads a model, which cannot be stopped."""
        return self._num_threads > 0

    async def drain(self, seconds: float) -> None:
        """Takes no more work, and waits for running requests; cancels them after `seconds`."""
        self.is_draining = True
        for slot in self._slots:
            self._stop_clock(slot)
            if slot.loading is not None:
                slot.loading.cancel()
        await asyncio.gather(*(model.drain(seconds) for model in self.models))

    def close(self) -> None:
        """Frees all models. Closing twice is harmless."""
        for model in self.models:
            model.close()

    def render_metrics(self) -> bytes:
        """Returns the page of `/metrics`."""
        return self.metrics.render({model.names[0]: model.registry for model in self.models})


def _without_folders(text: str) -> str:
    """Returns an error's text without the folders of absolute paths, which clients need not know."""
    return re.sub(r"(?<![\w.~-])~?/(?:[^/\s'\"]+/)+", "", text)
