"""The adapters that a loaded model holds: loading, unloading, and the slots that rows of a step are routed to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace.llm.adapters.adapted import AdapterTables
from pace.llm.adapters.experts import ExpertTensors
from pace.llm.adapters.modules import Place, Product, embeddings_of, places_of, tensors_of
from pace.llm.adapters.weights import AdapterModule, AdapterWeights
from pace.llm.layers import Embedding
from pace.llm.layers.linear import check_range
from pace.llm.layers.weight_target import WeightTarget
from pace.llm.sequence import AdapterKey
from pace.naming import listed
from pace.ops.adapters import AdapterMatrices, AdapterPart, AdapterTable, EmbeddingAdapters

if TYPE_CHECKING:
    from pace.llm.models.model import Model


@dataclass
class _Loaded:
    """An adapter in a slot."""

    slot: int
    name: str
    num_loads: int = 1
    """0 once it is unloaded, while sequences still use it."""


class AdapterSlots:
    """Up to `max_adapters` adapters of one model, each of rank up to `max_rank`. A step routes each row to those of its
    sequence (`Sequence.adapter`).

    An adapter is known by the digest of its contents, not by its name or slot. So a new adapter is never taken for an
    old one. Not thread-safe: the engine's thread calls everything but `check` between two steps
    (`EngineDriver.call`)."""

    def __init__(self, model: Model, max_adapters: int = 8, max_rank: int = 64):
        """Takes no memory: adapters take theirs when they are loaded. `model` is loaded before `check` and `load`."""
        for name, value in (("max_adapters", max_adapters), ("max_rank", max_rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of 1 or more; got {value!r}")
        self.model = model
        self.max_adapters = max_adapters
        self.max_rank = max_rank
        self.tables = AdapterTables()
        """The adapters of all slots. Another object once an adapter has a product that no other one had: then the
        forward pass is recorded anew."""
        self._loaded: dict[str, _Loaded] = {}

    # -- loading

    @cached_property
    def _places(self) -> dict[str, list[Place]]:
        return places_of(self.model)

    @cached_property
    def _embeddings(self) -> dict[str, Embedding]:
        return embeddings_of(self.model)

    def check(self, weights: AdapterWeights) -> None:
        """Raises unless the adapter fits the model; from any thread.

        ValueError: modules that the model does not have, shapes other than the model's, a rank above `max_rank`; one
        error lists all. NotImplementedError, by name: adapters of norms, experts, towers, tables in a file, and of the
        products of heads in latent attention."""
        targets, model = self.model.targets(), type(self.model).__name__
        unknown, other, wrong = [], [], []
        for path, tensor in tensors_of(self.model, weights.modules).items():
            module, shape = weights.modules[path], self._shape(tensor, weights.modules[path])
            if shape is None and tensor not in targets and tensor not in ExpertTensors(self.model).parts:
                unknown.append(path)
            elif shape is None or not self._is_whole(tensor, shape, targets):
                other.append(path)
            elif (module.b.shape[0], module.a.shape[1]) != shape:
                wrong.append(
                    f"{path} has A {list(module.a.shape)} and B {list(module.b.shape)}, for a matrix {list(shape)}"
                )
            elif module.rank > self.max_rank:
                wrong.append(
                    f"{path} has rank {module.rank}, more than max_rank={self.max_rank}; load the model with "
                    f"max_lora_rank={module.rank} or more"
                )
        other += [*weights.experts, *weights.wholes]
        if other:
            raise NotImplementedError(
                f"the adapter {weights.name!r} changes {listed(other)}: adapters of norms, experts, encoders of "
                "images and sound, tables in files, the heads of latent attention, and modules trained in full are "
                "not implemented for each request; merge it (LLMModel(path, adapter=..., merge=True)), or train one "
                "without these modules"
            )
        problems = {f"modules that {model} does not have": unknown, "of the wrong size": wrong}
        if lines := [f"{title} ({len(found)}): {listed(found)}" for title, found in problems.items() if found]:
            raise ValueError(f"the adapter {weights.name!r} does not fit this model:\n  " + "\n  ".join(lines))

    def _shape(self, tensor: str, module: AdapterModule) -> tuple[int, int] | None:
        """Rows of B and columns of A for a tensor; None if it cannot have such an adapter."""
        if module.of_embedding:
            embedding = self._embeddings.get(tensor)
            return (embedding.k, embedding.n) if embedding else None
        places = self._places.get(tensor, [])
        num_rows = sum(len(place.product.parts[place.part].rows) for place in places)
        return (num_rows, places[0].product.layer.k) if places else None

    def _is_whole(self, tensor: str, shape: tuple[int, int], targets: Mapping[str, list[WeightTarget]]) -> bool:
        """True if products that may have adapters use all rows of a tensor."""
        return tensor in self._embeddings or tensor not in targets or shape[0] == targets[tensor][0].num_rows

    def load(self, weights: AdapterWeights) -> str:
        """Loads an adapter into a free slot and returns its digest, which `Sequence.adapter` names from then on. If
        equal contents are loaded again, they are only counted, and each load needs an `unload`.

        Raises as `check`, and ValueError if every slot is taken: "8 adapters are loaded (max_adapters=8): ..."."""
        digest = weights.digest
        if digest in self._loaded:
            self._loaded[digest].num_loads += 1
            return digest
        self.check(weights)
        if not self.num_free:
            names = ", ".join(sorted(loaded.name for loaded in self._loaded.values()))
            raise ValueError(
                f"{len(self._loaded)} adapters are loaded (max_adapters={self.max_adapters}): {names}; unload one that "
                "is not in use, or load the model with a larger max_adapters"
            )
        taken = {loaded.slot for loaded in self._loaded.values()}
        slot = next(slot for slot in range(self.max_adapters) if slot not in taken)
        self._fill(slot, weights)
        self._loaded[digest] = _Loaded(slot, weights.name)
        return digest

    def _fill(self, slot: int, weights: AdapterWeights) -> None:
        """Writes the matrices of an adapter into a slot of each product and embedding that it changes."""
        found: dict[Product, dict[int, AdapterModule]] = {}
        embedded: list[tuple[Embedding, AdapterModule]] = []
        for path, tensor in tensors_of(self.model, weights.modules).items():
            module = weights.modules[path]
            if module.of_embedding:
                embedded.append((self._embeddings[tensor], module))
                continue
            for place in self._places[tensor]:
                found.setdefault(place.product, {})[place.part] = module
        products = {id(product.layer.weight): self._table(product) for product in found}
        embeddings = {id(layer.weight): self._embedding_table(layer) for layer, _ in embedded}
        tables = AdapterTables(products | self.tables.products, embeddings | self.tables.embeddings)
        ops, dtype = self.model.ops, self.model.dtype
        matrices: list[Tensor] = []
        for product, modules in found.items():
            matrices.append(torch.cat([modules[part].a.to(torch.float32) for part in sorted(modules)]))
            matrices += [modules[part].b[product.parts[part].rows] for part in sorted(modules)]
        for layer, module in embedded:
            matrices += [tables.embeddings[id(layer.weight)].selector(slot, module.rank), module.b]
        for matrix in [*matrices, *(module.a for _, module in embedded)]:
            check_range(matrix, dtype, f"the adapter {weights.name!r}")
        packed = iter(ops.pack_matrices(matrices, dtype))
        filled: list[tuple[AdapterTable, AdapterMatrices]] = []
        for product, modules in found.items():
            a, parts = next(packed), [None] * len(product.parts)
            for part in sorted(modules):
                module, rows = modules[part], product.parts[part].rows
                bias = None if module.bias is None else module.bias[rows].float()
                parts[part] = AdapterPart(next(packed), bias, module.scale)
            filled.append((tables.products[id(product.layer.weight)], AdapterMatrices(a, tuple(parts))))
        if len(tables) > len(self.tables):
            self.tables = tables
        for table, of_product in filled:
            table.put(slot, of_product)
        for layer, module in embedded:
            of_rows = AdapterMatrices(next(packed), (AdapterPart(next(packed), None, module.scale),))
            self.tables.embeddings[id(layer.weight)].put(slot, module.a.T.to(dtype).contiguous(), of_rows)

    def _table(self, product: Product) -> AdapterTable:
        columns = [len(part.rows) for part in product.parts]
        return AdapterTable(product.layer.k, columns, self.max_adapters, self.max_rank, self.model.dtype)

    def _embedding_table(self, layer: Embedding) -> EmbeddingAdapters:
        return EmbeddingAdapters(layer.n, layer.k, self.max_adapters, self.max_rank, self.model.dtype)

    # -- unloading

    def unload(self, digest: str) -> None:
        """Ends one load. After the last one, no new sequence may name the adapter. It leaves its slot when no sequence
        in the engine names it any more (`free`). Raises KeyError if it is not loaded."""
        loaded = self._loaded[digest]
        if not loaded.num_loads:
            raise KeyError(digest)
        loaded.num_loads -= 1

    @property
    def has_leaving(self) -> bool:
        """True if an adapter that is unloaded is still in its slot."""
        return any(not loaded.num_loads for loaded in self._loaded.values())

    def free(self, in_use: Iterable[AdapterKey]) -> None:
        """Empties the slots of unloaded adapters that none of these sequences names."""
        used = {digest for key in in_use for digest, _ in key}
        for digest, loaded in list(self._loaded.items()):
            if not loaded.num_loads and digest not in used:
                for table in self.tables.all():
                    table.clear(loaded.slot)
                del self._loaded[digest]

    # -- reading

    def holds(self, key: AdapterKey) -> bool:
        """True if new sequences may name these adapters."""
        return all(digest in self._loaded and self._loaded[digest].num_loads for digest, _ in key)

    def route(self, key: AdapterKey) -> list[tuple[int, float]]:
        """Returns (slot, weight) of the adapters of a sequence, in the order of the key. Raises KeyError for one that
        is not in a slot."""
        return [(self._loaded[digest].slot, weight) for digest, weight in key]

    @property
    def num_free(self) -> int:
        """Number of free slots. A slot whose adapter is unloaded but still in use is not free."""
        return self.max_adapters - len(self._loaded)

    @property
    def nbytes(self) -> int:
        """Bytes of all loaded adapters."""
        return sum(table.nbytes for table in self.tables.all())
