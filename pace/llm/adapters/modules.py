"""Where the modules that an adapter names are in a model: products, and the columns of them that a module makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pace.llm.layers import Embedding, Linear, TiedLMHead
from pace.llm.loading.names import name_in_model

if TYPE_CHECKING:
    from pace.llm.models.model import Model

HEAD = "lm_head.weight"


@dataclass(frozen=True, eq=False)
class ProductPart:
    """Neighbouring columns of a product that one tensor of the checkpoint makes."""

    tensor: str
    rows: Tensor
    """int64: the row of the tensor for each column."""


@dataclass(frozen=True, eq=False)
class Product:
    """A product of the model: that of a layer's weight, or of a tied head."""

    layer: Linear
    parts: list[ProductPart]


class Place(NamedTuple):
    """Columns of a product."""

    product: Product
    part: int


def products_of(model: Model) -> Iterator[Product]:
    """Yields the products that may have adapters: all of the forward pass, but those of experts and of heads."""
    excluded = {id(expert) for stack in model.stacks() for expert in stack.experts} | _aside(model)
    head = model.lm_head.embedding if isinstance(model.lm_head, TiedLMHead) else model.lm_head
    if head is not None:
        yield Product(head, [ProductPart(HEAD, torch.arange(head.n))])
    for matrix in model.matrices():
        if matrix is not head and not isinstance(matrix, Embedding) and id(matrix) not in excluded:
            yield Product(matrix, _parts_of(matrix))


def _parts_of(matrix: Linear) -> list[ProductPart]:
    """Returns the parts of a matrix, with neighbours from one tensor as one part."""
    found: list[tuple[str, list[Tensor]]] = []
    for name, count in matrix.parts.items():
        source, tensor = matrix.sources.get(name), matrix.tensor(name)
        ranges = source.rows if source else ()
        rows = [part.indices(0, part.count) for part in ranges] or [torch.arange(count)]
        if found and found[-1][0] == tensor:
            found[-1][1].extend(rows)
        else:
            found.append((tensor, rows))
    return [ProductPart(tensor, torch.cat(rows)) for tensor, rows in found]


def places_of(model: Model) -> dict[str, list[Place]]:
    """Returns name of a tensor -> its columns of products."""
    places: dict[str, list[Place]] = {}
    for product in products_of(model):
        for index, part in enumerate(product.parts):
            places.setdefault(part.tensor, []).append(Place(product, index))
    return places


def embeddings_of(model: Model) -> dict[str, Embedding]:
    """Returns name of a tensor -> the embedding of the forward pass that holds it."""
    aside = _aside(model)
    return {
        matrix.tensor(part): matrix
        for matrix in model.matrices()
        if isinstance(matrix, Embedding) and id(matrix) not in aside
        for part in matrix.parts
    }


def _aside(model: Model) -> set[int]:
    """Ids of the matrices that the forward pass of text does not use."""
    return {id(matrix) for layer in model.layers_aside for matrix in layer.matrices()}


def tensors_of(model: Model, paths: Iterable[str]) -> dict[str, str]:
    """Returns module path -> the model's name of its tensor, whether the model has it or not. Paths may be those of
    any class that `transformers` has for the checkpoint, such as the bare decoder."""
    return _names(model, {path: f"{path}.weight" for path in paths})


def whole_tensors_of(model: Model, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors by the model's names. If head and embedding are one matrix, its copy under the head's name is
    kept."""
    names = _names(model, {name: name for name in wholes})
    return {here: wholes[name] for name, here in names.items()}


def _names(model: Model, given: Mapping[str, str]) -> dict[str, str]:
    names = {key: name_in_model(model, name) for key, name in given.items()}
    if any(name.startswith(model.prefix) for name in names.values()):
        return names
    return {key: name if name.startswith(model.outside) else model.prefix + name for key, name in names.items()}
