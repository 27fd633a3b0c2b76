"""A server of several small models in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pace.assets import TINY, TINY_DRAFT
from pace.llm.loading.options import LoadOptions
from pace.server.limits import Limits
from pace.server.models.pool import ModelPool
from pace.server.models.shared import Shared
from pace.server.options import ModelEntry, ServeOptions
from pace.server.service import Service
from tests.server.serving import Reply, Serving
from tests.waiting import PATIENCE, wait_until

MODELS = {"chat": TINY, "small": TINY_DRAFT}


class SeveralServing(Serving):
    """A running server of `models`, for a `with` block. Its end checks that nothing in the engines is in use."""

    def __init__(self, models: dict[str, Path] = MODELS, idle_unload: float | None = None, **options: Any) -> None:
        """`options` are fields of `ServeOptions`, or names of limits."""
        names = Limits.names()
        chosen = {name: options.pop(name) for name in list(options) if name in names}
        limits = Limits(**{"max_wait": PATIENCE, **chosen})
        entries = tuple(ModelEntry((name,), str(path), idle_unload=idle_unload) for name, path in models.items())
        self.options = ServeOptions(entries[0].model, models=entries, limits=limits, **options)
        self.pool = ModelPool.make(self.options, self._make)

    def _make(self, entry: ModelEntry, shared: Shared) -> Service:
        load = LoadOptions(entry.model, progress=False, kv_cache_bytes="16MiB", dtype="float32")
        return Service(self.options.of(entry), load, shared)

    def __enter__(self) -> SeveralServing:
        super().__enter__()
        self.on_loop(self.pool.load())
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.pool.close()

    def on_loop(self, coroutine: Any) -> Any:
        """Runs a coroutine on the server's loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def check_idle(self) -> None:
        for service in self.pool.models:
            wait_until(lambda service=service: service.admission is None or not service.admission.num_requests)
            if (generator := getattr(service, "generator", None)) is not None:
                generator.driver.call(lambda engine: engine.check_idle()).result(PATIENCE)

    def tell(self, model: str | None, prompt: str = "Once upon a time", **fields: Any) -> str:
        """Returns the greedy text of a model."""
        named = {} if model is None else {"model": model}
        return text_of(self.complete(prompt, **{"max_tokens": 16, **named, **fields}))

    def loaded(self) -> dict[str, bool]:
        return {entry["id"]: entry["loaded"] for entry in self.ask("/v1/models").json["data"]}


def text_of(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]
