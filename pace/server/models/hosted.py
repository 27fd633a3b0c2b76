"""What a pool needs of a model: `HostedModel`."""

from __future__ import annotations

from typing import Any, Protocol

from prometheus_client import CollectorRegistry


class HostedModel(Protocol):
    """One model of a pool. `Service` is the one that generates; a model of another kind has a class of its own.

    The pool calls `load` and `unload` on threads, never two of them at once, in any order and number. It calls
    everything else on the event loop. No request uses the model while it is unloaded.
    """

    task: str
    """What the model is for, as in `ServeOptions.task`."""
    does: str
    """The same in words for clients, which follow "it"."""
    started: int
    """Time at which the model was first asked for, in seconds since 1970."""
    status: str
    """ "loading" for the first time, "ready", "unloaded", "reloading", "failed" or "draining". The pool sets it before
    `load` and `unload`, and the model at the end of `load`."""
    max_length: int | None
    """Maximum number of tokens of a sequence; None until the model was loaded once."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names in requests; the first is its id. Names of loaded adapters follow, so this may change."""

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request's body, in bytes."""

    @property
    def registry(self) -> CollectorRegistry:
        """Its metrics. The pool adds the model's name to them."""

    def load(self) -> None:
        """Reads the weights. Sets `status` to "ready", or to "failed" and raises the error of loading."""

    def unload(self) -> None:
        """Frees weights and caches. A later `load` brings the model back, with its adapters and kept prefixes."""

    def use_turns(self, turns: Any) -> None:
        """Steps the engine only within `with turns:`, from the next `load` on: models of a process share its kernel
        threads (`pace.llm.engine.turns.StepTurns`)."""

    def properties(self) -> dict[str, Any]:
        """Returns the answer of `/props` for the loaded model. Runs in a worker. Raises ApiError."""

    @property
    def why_unwell(self) -> str | None:
        """Reason why the model cannot answer any more, or why a step is stuck; None if all is well."""

    @property
    def described(self) -> dict[str, Any]:
        """Members of its entry in `/v1/models` besides those that every model has."""

    def check_room(self) -> None:
        """Raises ApiError 429 if no request would be accepted now."""

    async def drain(self, seconds: float) -> None:
        """Takes no more work, and waits for running requests; cancels them after `seconds`."""

    def close(self) -> None:
        """Frees everything. Closing twice is harmless."""
