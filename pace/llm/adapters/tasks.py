"""Adapters for tasks that are a part of an encoder's checkpoint, as in jina-embeddings-v3. All tasks are in one tensor:

roberta.encoder.layers.0.mixer.Wqkv.parametrizations.weight.0.lora_A           [tasks, r, K]
roberta.encoder.layers.0.mixer.Wqkv.parametrizations.weight.0.lora_B           [tasks, N, r]
roberta.embeddings.word_embeddings.parametrizations.weight.0.lora_A            [tasks, V, r]
roberta.embeddings.word_embeddings.parametrizations.weight.0.lora_B            [tasks, r, N]
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from pace.llm.adapters.weights import AdapterModule, AdapterWeights
from pace.llm.layers.base import FLOAT_DTYPES
from pace.llm.loading.fill import TensorReader

PART = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<part>[AB])")
EMBEDDING = re.compile(r".*_embeddings")
"""Modules that are tables: A and B are those of the transposed matrix."""
UNUSED = re.compile(r"(.*\.)?pooler\.dense")
"""A module that no vector is made of."""


def read_tasks(reader: TensorReader, tasks: Sequence[str], alpha: float, rank: int) -> list[AdapterWeights]:
    """Returns the adapter of each task; an empty list for a checkpoint without adapters.

    Raises ValueError for tensors of other shapes, for A without B, and for values that are not finite."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name in sorted(reader.tensors):
        found = PART.fullmatch(name)
        if found and not UNUSED.fullmatch(found["module"]):
            parts.setdefault(found["module"], {})[found["part"]] = _read(reader, name, len(tasks))
    modules = {module: _matrices(module, found, rank) for module, found in parts.items()}
    if not modules:
        return []
    return [
        AdapterWeights(
            task,
            {
                module: AdapterModule(a[index], b[index], None, alpha / rank, EMBEDDING.fullmatch(module) is not None)
                for module, (a, b) in modules.items()
            },
        )
        for index, task in enumerate(tasks)
    ]


def _read(reader: TensorReader, name: str, num_tasks: int) -> Tensor:
    """Returns a copy of a tensor."""
    dtype, shape = reader.tensors[name]
    if dtype not in FLOAT_DTYPES or len(shape) != 3 or shape[0] != num_tasks:
        raise ValueError(
            f"{name} must be floats [{num_tasks}, ...], a matrix for each of lora_adaptations in config.json; got "
            f"{dtype} {list(shape)}"
        )
    rows = reader.read(name)
    assert isinstance(rows, Tensor)
    tensor = rows.clone().view(shape)
    reader.release(name)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} has values that are not finite")
    return tensor


def _matrices(module: str, parts: dict[str, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Returns A `[tasks, r, K]` and B `[tasks, N, r]` of a module."""
    if missing := {"A", "B"} - parts.keys():
        raise ValueError(f"{module} has only a part of its adapters: lora_{missing.pop()} is missing")
    a, b = parts["A"], parts["B"]
    if EMBEDDING.fullmatch(module):
        a, b = a.transpose(1, 2), b.transpose(1, 2)
    if (a.shape[1], b.shape[2]) != (rank, rank):
        raise ValueError(
            f"{module}: lora_rank is {rank} in config.json, but lora_A is {list(parts['A'].shape)} and lora_B "
            f"{list(parts['B'].shape)}"
        )
    return a, b
