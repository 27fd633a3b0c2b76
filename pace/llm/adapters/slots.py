"""The adapters that a loaded model holds: loading, unloading, and the slot that a row of a step is routed to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pace.llm.adapters.weights import AdapterWeights

if TYPE_CHECKING:
    from pace.llm.models.base_model import BaseModelForCausalLM
    from pace.llm.sequence import AdapterKey


class AdapterSlots:
    """Up to `max_adapters` adapters of one model, each of rank up to `max_rank`. A step routes each row to those of its
    sequence (`Sequence.adapter`).

    An adapter is known by the digest of its contents, never by its name or slot: a new adapter cannot be taken for an
    old one. Not thread-safe: the engine's thread calls everything but `check` between two steps
    (`EngineDriver.call`)."""

    def __init__(self, model: BaseModelForCausalLM, max_adapters: int = 8, max_rank: int = 64):
        """Takes no memory: adapters take theirs when they are loaded. `model` is loaded."""

    def check(self, weights: AdapterWeights) -> None:
        """Raises unless the adapter fits the model; from any thread.

        ValueError: modules that the model does not have, shapes other than the model's, a rank above `max_rank`; one
        error lists all. NotImplementedError, by name: adapters of embeddings, norms, experts, towers, and of the
        products of heads in latent attention."""
        raise NotImplementedError

    def load(self, weights: AdapterWeights) -> str:
        """Loads an adapter into a free slot and returns its digest, which `Sequence.adapter` names from then on. Loading
        equal contents again only counts: `unload` is then due once for each.

        Raises as `check`, and ValueError if every slot is taken: "8 adapters are loaded (max_adapters=8): ..."."""
        raise NotImplementedError

    def unload(self, digest: str) -> None:
        """Ends one load. After the last one no new sequence may name the adapter, and it leaves its slot when no
        sequence in the engine names it any more. Raises KeyError if it is not loaded."""
        raise NotImplementedError

    def holds(self, key: AdapterKey) -> bool:
        """True if new sequences may name these adapters."""
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        """Number of free slots. A slot whose adapter is unloaded but still in use is not free."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all loaded adapters."""
        raise NotImplementedError
