"""The models of a server, by name: `ModelPool`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pace.server.models.hosted import HostedModel
from pace.server.options import ServeOptions


class ModelPool:
    """Finds the model of a request, loads it if needed, and unloads models that nobody uses.

    An endpoint gets the model from the pool, and `scope["app"].state.pool` is the pool:

        async with pool.use(request.model) as model:     # 404, or waits for a load, or 503
            ...                                          # the model stays loaded until the block ends
    """

    def __init__(self, options: ServeOptions, models: Sequence[HostedModel]) -> None:
        """The first model answers requests without a name."""

    def find(self, name: str | None) -> HostedModel:
        """Returns the model of a name, loaded or not; the first without one. Raises ApiError 404."""
        raise NotImplementedError

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[HostedModel]:
        """Yields the model of a name, loaded, and keeps it loaded until the block ends.

        Waits for a load up to `max_wait` seconds. Raises ApiError 404 for an unknown name, and 503 if the model is not
        loaded by then, if it cannot be loaded, or if the server shuts down."""
        raise NotImplementedError
        yield
