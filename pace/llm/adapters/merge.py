"""Merging an adapter into the weights of its base while they are read: `W' = W + scale * B A`, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace.checkpoints.files import Version
from pace.llm.adapters.modules import HEAD, tensors_of
from pace.llm.adapters.weights import AdapterModule, AdapterWeights
from pace.llm.layers import TiedLMHead
from pace.llm.layers.base import FLOAT_DTYPES
from pace.llm.layers.weight_target import Piece
from pace.llm.loading.fill import TensorReader
from pace.llm.loading.names import match_names

if TYPE_CHECKING:
    from pace.llm.models.base_model import BaseModelForCausalLM


class MergedReader:
    """A checkpoint with an adapter merged into its matrices, which are read in float32. They are rounded once, to the
    dtype of the model or by a quantisation."""

    def __init__(self, reader: TensorReader, model: BaseModelForCausalLM, weights: AdapterWeights):
        """`model` is not loaded yet. Raises ValueError for modules that the checkpoint does not have, and for other
        shapes. The same holds for matrices that are quantised: their codes would have to be computed anew."""
        self._reader = reader
        sources = {here: name for name, here in match_names(model, reader).items()}
        targets, problems = model.targets(), []
        self._changes: dict[str, Callable[[Tensor, int, int], Tensor]] = {}
        for path, tensor in tensors_of(model, weights.modules).items():
            module, name = weights.modules[path], sources.get(tensor)
            if tensor == HEAD and isinstance(model.lm_head, TiedLMHead):
                raise ValueError(
                    f"the adapter {weights.name!r} changes the head, which is the embedding's matrix in this model; "
                    "load the adapter without merge=True"
                )
            if name is None or tensor not in targets:
                problems.append(f"{path}: the checkpoint has no such matrix")
                continue
            (dtype, shape), transposed = reader.tensors[name], targets[tensor][0].transposed
            if dtype not in FLOAT_DTYPES:
                raise ValueError(
                    f"{name} is quantised ({dtype}), and an adapter is merged into floats only; load the adapter "
                    "without merge=True, or merge it into the original checkpoint"
                )
            wanted = (module.b.shape[0], module.a.shape[1])
            if tuple(shape) != (wanted[::-1] if transposed else wanted):
                problems.append(f"{path}: A and B are for a matrix {list(wanted)}; {name} has shape {list(shape)}")
                continue
            self._changes[name] = _change_of(module, transposed)
            if module.bias is not None:
                bias = sources.get(tensor.removesuffix("weight") + "bias")
                if bias is None:
                    problems.append(f"{path} has a bias, and the checkpoint has none to add it to")
                else:
                    self._changes[bias] = _change_of_bias(module)
        if problems:
            raise ValueError(
                f"the adapter {weights.name!r} cannot be merged into this checkpoint:\n  " + "\n  ".join(problems)
            )
        self.tensors = {
            name: (torch.promote_types(dtype, torch.float32) if name in self._changes else dtype, shape)
            for name, (dtype, shape) in reader.tensors.items()
        }

    @property
    def files(self) -> dict[Path, Version]:
        return self._reader.files

    def column_order(self, name: str) -> Tensor | None:
        return self._reader.column_order(name)

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        return self._reader.row_ranges(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Piece:
        rows = self._reader.read(name, start, stop)
        if name not in self._changes:
            return rows
        assert isinstance(rows, Tensor)
        return self._changes[name](rows.to(self.tensors[name][0]), start, start + len(rows))

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        self._reader.release(name, start, stop)

    def keep(self, name: str) -> None:
        self._reader.keep(name)


def _change_of(module: AdapterModule, transposed: bool) -> Callable[[Tensor, int, int], Tensor]:
    """Returns `change(rows, start, stop)`: rows `start .. stop` of the matrix, with the adapter."""
    a, b = module.a.float(), module.b.float()
    left, right = (a.T.contiguous(), b.T) if transposed else (b, a)
    return lambda rows, start, stop: rows + (left[start:stop] @ right).to(rows.dtype) * module.scale


def _change_of_bias(module: AdapterModule) -> Callable[[Tensor, int, int], Tensor]:
    assert module.bias is not None
    added = module.bias.float() * module.scale
    return lambda values, start, stop: values + added[start:stop].to(values.dtype)
