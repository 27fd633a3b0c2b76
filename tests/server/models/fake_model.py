"""A model of a pool that computes nothing, and a pool of such models."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry

from pace.server.limits import Limits
from pace.server.models.pool import ModelPool
from pace.server.models.shared import Shared
from pace.server.options import ModelEntry, ServeOptions
from tests.waiting import PATIENCE


class FakeModel:
    """Loads when `may_load` is set, with the errors of `failures`, one for each load. Records what is done to it."""

    task, does = "generate", "does nothing"
    max_length = 100
    max_body_bytes = 1000
    started = 0
    described: dict[str, Any] = {}
    why_unwell = None

    def __init__(self, name: str) -> None:
        self.names = (name,)
        self.status = "loading"
        self.registry = CollectorRegistry()
        self.done: list[str] = []
        self.failures: list[Exception] = []
        self.may_load, self.may_unload = threading.Event(), threading.Event()
        self.may_load.set(), self.may_unload.set()
        self.is_loaded = False

    def load(self) -> None:
        assert not self.is_loaded
        assert self.may_load.wait(PATIENCE)
        self.done.append("load")
        if self.failures:
            self.status = "failed"
            raise self.failures.pop(0)
        self.is_loaded, self.status = True, "ready"

    def unload(self) -> None:
        assert self.is_loaded
        assert self.may_unload.wait(PATIENCE)
        self.done.append("unload")
        self.is_loaded = False

    def use_turns(self, turns: Any) -> None:
        self.turns = turns

    def properties(self) -> dict[str, Any]:
        assert self.is_loaded
        return {"model_alias": self.names[0]}

    def check_room(self) -> None: ...

    async def drain(self, seconds: float) -> None:
        self.status = "draining"

    def close(self) -> None:
        self.done.append("close")


def make_pool(*names: str, max_wait: float = PATIENCE, any_model_name: bool = False, **entry: Any) -> ModelPool:
    """`entry` are fields of each `ModelEntry`."""
    entries = tuple(ModelEntry((name,), name, **entry) for name in names)
    limits = Limits(max_wait=max_wait)
    options = ServeOptions(names[0], models=entries, limits=limits, any_model_name=any_model_name)
    return ModelPool(options, [FakeModel(name) for name in names], Shared(options))
