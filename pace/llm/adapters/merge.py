"""Merging an adapter into the weights of its base while they are read: `W' = W + scale * B A`, in float32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace.checkpoints.files import Version
from pace.checkpoints.safetensors_file import TensorInfo
from pace.llm.adapters.experts import ExpertPart, ExpertTensors
from pace.llm.adapters.modules import HEAD, tensors_of, whole_tensors_of
from pace.llm.adapters.weights import AdapterModule, AdapterWeights
from pace.llm.layers import TiedLMHead
from pace.llm.layers.base import FLOAT_DTYPES
from pace.llm.layers.weight_target import Piece
from pace.llm.loading.fill import TensorReader
from pace.llm.loading.names import match_names

if TYPE_CHECKING:
    from pace.llm.models.model import Model


@dataclass(frozen=True)
class Change:
    """`rows += scale * left right` of some rows of a tensor."""

    rows: Tensor
    """int64 `[n]`, ascending; counted through all dimensions of the tensor but the last."""
    left: Tensor
    """float32 `[n, r]`."""
    right: Tensor
    """float32 `[r, columns]`."""
    scale: float

    def apply(self, piece: Tensor, start: int) -> None:
        """Changes rows `start ..` of the tensor."""
        first, last = torch.searchsorted(self.rows, torch.tensor([start, start + len(piece)])).tolist()
        if first < last:
            rows = self.rows[first:last] - start
            low, high = int(rows[0]), int(rows[-1]) + 1
            added = (self.left[first:last] @ self.right).to(piece.dtype) * self.scale
            piece[slice(low, high) if high - low == len(rows) else rows] += added


class MergedReader:
    """A checkpoint with an adapter merged into its matrices, which are read in float32. They are rounded once, to the
    dtype of the model or by a quantisation."""

    def __init__(self, reader: TensorReader, model: Model, weights: AdapterWeights):
        """`model` is not loaded yet. Raises ValueError for modules that the checkpoint does not have, and for other
        shapes. The same holds for matrices that are quantised: their codes would have to be computed anew."""
        self._reader = reader
        names = match_names(model, reader)
        model.choose({here: tuple(reader.tensors[name][1]) for name, here in names.items()})
        self._sources = {here: name for name, here in names.items()}
        self._targets = model.targets()
        self._changes: dict[str, list[Change]] = {}
        self._added: dict[str, Tensor] = {}
        """What is added to biases."""
        self._wholes: dict[str, Tensor] = {}
        self._problems: list[str] = []
        _check_tied(model, weights)
        self._merge_modules(model, weights)
        self._merge_experts(model, weights)
        self._replace(model, weights.wholes)
        if self._problems:
            raise ValueError(
                f"the adapter {weights.name!r} cannot be merged into this checkpoint:\n  " + "\n  ".join(self._problems)
            )
        changed = self._changes.keys() | self._added.keys()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(torch.promote_types(dtype, torch.float32) if name in changed else dtype, tuple(shape))
            for name, (dtype, shape) in reader.tensors.items()
        } | {name: TensorInfo(whole.dtype, tuple(whole.shape)) for name, whole in self._wholes.items()}

    # -- what is changed

    def _merge_modules(self, model: Model, weights: AdapterWeights) -> None:
        experts, ignored = ExpertTensors(model), list(model.ignored())
        for path, tensor in tensors_of(model, weights.modules).items():
            module = weights.modules[path]
            if tensor in self._sources and tensor in self._targets:
                self._merge(path, tensor, module)
            elif tensor in self._sources and any(re.fullmatch(pattern, tensor) for pattern in ignored):
                continue  # of no effect, as the pooler of an encoder
            elif tensor in experts.parts:
                self._merge_expert(path, experts.parts[tensor][0], module)
            else:
                self._problems.append(f"{path}: the checkpoint has no such matrix")

    def _merge_experts(self, model: Model, weights: AdapterWeights) -> None:
        experts = ExpertTensors(model)
        for path, of_tensors in weights.experts.items():
            try:
                matched = experts.matched(path, of_tensors)
            except ValueError as error:
                self._problems.append(str(error))
                continue
            for tensor, matrices in matched:
                parts, parameter = experts.parts[tensor], f"{path}.{tensor.rpartition('.')[2]}"
                for part in parts:
                    self._merge_expert(path, part, matrices.of_expert(part.expert, len(parts), parameter))

    def _merge(self, path: str, tensor: str, module: AdapterModule) -> None:
        name, transposed = self._sources[tensor], self._targets[tensor][0].transposed
        self._check_floats(name)
        n, k = wanted = module.b.shape[0], module.a.shape[1]
        turned = transposed or module.of_embedding
        shape = tuple(self._reader.tensors[name][1])
        if shape != (wanted[::-1] if turned else wanted):
            self._problems.append(f"{path}: A and B are for a matrix {list(wanted)}; {name} has shape {list(shape)}")
            return
        left, right = (module.a.T, module.b.T) if turned else (module.b, module.a)
        self._add(name, torch.arange(k if turned else n), left, right, module.scale)
        if module.bias is not None:
            bias = self._sources.get(tensor.removesuffix("weight") + "bias")
            if bias is None:
                self._problems.append(f"{path} has a bias, and the checkpoint has none to add it to")
            else:
                self._added[bias] = module.bias.float() * module.scale

    def _merge_expert(self, path: str, part: ExpertPart, module: AdapterModule) -> None:
        wanted = module.b.shape[0], module.a.shape[1]
        if part.shape != wanted or module.bias is not None:
            bias = "" if module.bias is None else " and a bias"
            self._problems.append(f"{path}: A and B are for a matrix {list(wanted)}{bias}, not {list(part.shape)}")
            return
        for stored, rows in part.in_checkpoint():
            name, k = self._sources[stored.tensor], part.stack.k
            self._check_floats(name)
            height = self._targets[stored.tensor][0].shape[-2]
            if stored.transposed:
                right = torch.zeros(module.rank, self._targets[stored.tensor][0].shape[-1])
                right[:, stored.at] = module.b[rows].float().T
                self._add(name, stored.number * height + torch.arange(k), module.a.T, right, module.scale)
            else:
                at, order = stored.at.sort()
                self._add(name, stored.number * height + at, module.b[rows[order]], module.a, module.scale)

    def _add(self, name: str, rows: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        change = Change(rows, left.float().contiguous(), right.float().contiguous(), scale)
        self._changes.setdefault(name, []).append(change)

    def _replace(self, model: Model, wholes: Mapping[str, Tensor]) -> None:
        """Replaces tensors."""
        for here, whole in whole_tensors_of(model, wholes).items():
            name = self._sources.get(here)
            if name is None and here == HEAD and isinstance(model.lm_head, TiedLMHead):
                continue  # the embedding, which is the same, has its tensor
            if name is None or (here not in self._targets and here != HEAD):
                self._problems.append(f"{here}: the checkpoint has no such tensor")
            elif tuple(self._reader.tensors[name][1]) != tuple(whole.shape):
                self._problems.append(
                    f"{here} has shape {list(whole.shape)}, not {list(self._reader.tensors[name][1])}"
                )
            else:
                self._check_floats(name)
                self._wholes[name] = whole

    def _check_floats(self, name: str) -> None:
        dtype = self._reader.tensors[name][0]
        if dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} is quantised ({dtype}), and an adapter is merged into floats only; load the adapter without "
                "merge=True, or merge it into the original checkpoint"
            )

    # -- reading

    @property
    def files(self) -> dict[Path, Version]:
        return self._reader.files

    def column_order(self, name: str) -> Tensor | None:
        return self._reader.column_order(name)

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        return self._reader.row_ranges(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Piece:
        if name in self._wholes:
            return self._wholes[name][start:stop]
        rows = self._reader.read(name, start, stop)
        if name not in self._changes and name not in self._added:
            return rows
        assert isinstance(rows, Tensor)
        found = rows.to(self.tensors[name].dtype, copy=True)
        for change in self._changes.get(name, ()):
            change.apply(found, start)
        if name in self._added:
            found += self._added[name][start : start + len(found)].to(found.dtype)
        return found

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        self._reader.release(name, start, stop)

    def keep(self, name: str) -> None:
        self._reader.keep(name)


def _check_tied(model: Model, weights: AdapterWeights) -> None:
    """Raises ValueError for an adapter that makes a tied embedding and head different."""
    if not isinstance(model.lm_head, TiedLMHead):
        return
    (part,) = model.lm_head.embedding.parts
    embedding = model.lm_head.embedding.tensor(part)
    changed = set(tensors_of(model, weights.modules).values())
    for tensor, what in ((HEAD, "head, which is the embedding's matrix"), (embedding, "embedding, which is the head")):
        if tensor in changed:
            raise ValueError(
                f"the adapter {weights.name!r} changes the {what} in this model; load the adapter without merge=True"
            )
    wholes = whole_tensors_of(model, weights.wholes)
    found = [wholes[tensor] for tensor in (HEAD, embedding) if tensor in wholes]
    if len(found) == 1 or (found and not torch.equal(*found)):
        raise ValueError(
            f"the adapter {weights.name!r} makes embedding and head different, which are one matrix in this model; "
            "merge it with PEFT's merge_and_unload, and save the model with tie_word_embeddings=false"
        )
