"""Where a checkpoint has the matrices of experts. Adapters name them by each expert's own tensors, or by one tensor of
all experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pace.llm.adapters.weights import ExpertMatrices
from pace.llm.layers import ExpertLinear, Linear
from pace.llm.loading.names import name_in_model

if TYPE_CHECKING:
    from pace.llm.models.model import Model


class StoredRows(NamedTuple):
    """Rows of a matrix, and where a tensor has them."""

    tensor: str
    rows: Tensor
    """int64: rows of the matrix."""
    at: Tensor
    """int64: their rows in the tensor's matrix; its columns if the tensor is transposed."""
    number: int
    """Index of the matrix in the tensor's stack."""
    transposed: bool


def stored_rows(matrix: Linear) -> Iterator[StoredRows]:
    """Yields the rows of each part of a matrix."""
    first = 0
    for part, count in matrix.parts.items():
        rows, source = torch.arange(first, first + count), matrix.sources.get(part)
        first += count
        if source is None:
            yield StoredRows(matrix.tensor(part), rows, torch.arange(count), 0, False)
            continue
        at = torch.cat([found.indices(0, found.count) for found in source.rows]) if source.rows else torch.arange(count)
        height = source.shape[-1 if source.transposed else -2]
        yield StoredRows(matrix.tensor(part), rows, at % height, int(at[0]) // height, source.transposed)


@dataclass(frozen=True)
class ExpertPart:
    """What a tensor has of one expert."""

    stack: ExpertLinear
    expert: int
    rows: Tensor
    """int64: rows of the expert's matrix."""
    at: Tensor
    """int64: their rows in the tensor's matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.stack.k

    def in_checkpoint(self) -> Iterator[tuple[StoredRows, Tensor]]:
        """Yields where the checkpoint has these rows, and for each its row in this tensor's matrix."""
        place = torch.full((self.stack.n,), -1)
        place[self.rows] = self.at
        for stored in stored_rows(self.stack.experts[self.expert]):
            found = place[stored.rows] >= 0
            if found.any():
                yield stored._replace(rows=stored.rows[found], at=stored.at[found]), place[stored.rows[found]]


class ExpertTensors:
    """The tensors of experts in all forms that checkpoints have. The model has chosen the form of its checkpoint."""

    def __init__(self, model: Model):
        self._model = model

    @cached_property
    def parts(self) -> dict[str, list[ExpertPart]]:
        """Name of a tensor -> its parts, expert by expert."""
        parts: dict[str, list[ExpertPart]] = {}
        for stack in self._model.stacks():
            for form in stack.forms:
                of_form: dict[str, list[ExpertPart]] = {}
                for expert, matrix in enumerate(stack.in_form(form)):
                    for stored in stored_rows(matrix):
                        part = ExpertPart(stack, expert, stored.rows, stored.at)
                        of_form.setdefault(stored.tensor, []).append(part)
                for name, found in of_form.items():
                    parts.setdefault(name, found)  # of forms with the same names, the first counts
        return parts

    def matched(self, path: str, given: Sequence[ExpertMatrices]) -> list[tuple[str, ExpertMatrices]]:
        """Returns the tensor of all experts that each of some matrices changes. `path` is that of the experts' module.
        Raises ValueError for matrices of another size."""
        prefix = name_in_model(self._model, f"{path}.weight").removesuffix("weight")
        if not prefix.startswith(self._model.prefix):
            prefix = self._model.prefix + prefix
        inner = {name.removeprefix(prefix): name for name in self.parts if name.startswith(prefix)}
        names = [name for short, name in inner.items() if "." not in short]
        found: list[tuple[str, ExpertMatrices]] = []
        for matrices in given:
            named = [name for short, name in inner.items() if short == matrices.tensor]
            for name in named if matrices.tensor else names:
                part = self.parts[name][0]
                if name not in dict(found) and matrices.fits(len(self.parts[name]), *part.shape):
                    found.append((name, matrices))
                    break
            else:
                sizes = [f"{name.removeprefix(prefix)} {list(self.parts[name][0].shape)}" for name in names]
                whose = ".".join(filter(None, (path, matrices.tensor)))
                raise ValueError(
                    f"{whose} has A {list(matrices.a.shape)} and B {list(matrices.b.shape)}, which fit none of this "
                    f"model's experts ({', '.join(sizes) or 'there are none'})"
                )
        return found
