"""Matrices of a checkpoint, and the names under which they are written: `Parts`.

Most matrices have their own tensor and keep its name. A tensor whose rows are several parts of one product, such as
queries and their gates head by head, is written as it was. Experts that share a tensor are written one by one, as other
tools do. The matrices that make keys and values from latents are copied as floats."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from pace.checkpoints.reader import CheckpointReader
from pace.llm.adapters.merge import MergedReader
from pace.llm.layers import ExpertLinear, LatentAttention, Linear, MixtureOfExperts
from pace.llm.layers.base import Vectors
from pace.llm.layers.weight_target import WeightTarget
from pace.llm.loading.plan import plan_layout
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.quant import Format, QuantizationConfig


class Parts:
    """Maps a model's matrices to a checkpoint's tensors. Raises NotImplementedError for a tensor that holds the rows of
    several products other than experts, or columns."""

    def __init__(self, model: BaseModelForCausalLM, reader: CheckpointReader | MergedReader):
        names, targets = plan_layout(model, reader)
        self.prefix = model.prefix
        self.sources = {here: name for name, here in names.items() if here in targets}
        """Name in the model -> name in the checkpoint, for every required tensor."""
        self.alone: dict[int, Linear] = {}
        """Id of an expert that shares tensors -> a copy of the expert with separate tensors."""
        self.biases: dict[int, Vectors] = {}
        """Id of such an expert's bias -> a copy of the bias with separate tensors."""
        self.mixtures: dict[int, tuple[MixtureOfExperts, ExpertLinear]] = {}
        """Id of an expert -> its mixture, and its stack in that mixture."""
        self.heads: dict[int, Linear] = {}
        """Id -> matrix that makes keys or values from latents."""
        self.shared: set[str] = set()
        """Names of tensors that several experts share."""
        for layer in model.walk():
            if isinstance(layer, MixtureOfExperts):
                for stack in (layer.gate_up, layer.down):
                    self._add_experts(layer, stack)
            elif isinstance(layer, LatentAttention):
                self.heads |= {id(head): head for stack in (layer.keys_up, layer.values_up) for head in stack.experts}
        self.copied = {name for head in self.heads.values() for name in head.targets()}
        self.copied |= {table.name for table in model.tables()}
        """Names of tensors that are written unchanged."""
        self.whole = {
            name
            for leaf in model.walk()
            if isinstance(leaf, (Linear, Vectors))
            for name, rows in rows_of_tensors(leaf).items()
            if num_rows(rows) == targets[name][0].num_rows
        }
        """Names of tensors whose rows all belong to one product, or to its bias."""
        for name, found in targets.items():
            self._check(name, found)

    def _add_experts(self, mixture: MixtureOfExperts, stack: ExpertLinear) -> None:
        self.mixtures |= {id(expert): (mixture, stack) for expert in stack.experts}
        if not all(
            target.is_plain for expert in stack.experts for found in expert.targets().values() for target in found
        ):
            self.alone |= {id(expert): alone for expert, alone in zip(stack.experts, stack.apart())}
            self.biases |= {id(e.bias): self.alone[id(e)].bias for e in stack.experts}
            self.shared |= {name for expert in stack.experts for name in expert.targets()}

    def _check(self, name: str, targets: list[WeightTarget]) -> None:
        is_known = (
            name in self.shared | self.copied or name in self.whole and all(not target.is_turned for target in targets)
        )
        if not is_known and not all(target.is_plain for target in targets):
            raise NotImplementedError(
                f"{name} holds columns, or rows of several matrices; pace quantize writes only experts and matrices "
                f"with a tensor of their own. Load the checkpoint with quantization instead"
            )

    def of(self, product: Linear) -> Iterator[tuple[str, slice | Tensor]]:
        """Names of a product's parts as they are written, and their rows in this order."""
        for name, rows in rows_of_tensors(self.written(product)).items():
            yield name.removesuffix(".weight"), rows

    def written(self, product: Linear) -> Linear:
        """The product with the parts that are written."""
        return self.alone.get(id(product), product)

    def elements(self, vectors: Vectors) -> dict[str, slice | Tensor]:
        """Names of the tensors that the vectors are written as, and their elements in this order."""
        return rows_of_tensors(self.biases.get(id(vectors), vectors))

    def target(self, name: str) -> str:
        """Name of a model's tensor in the result: the checkpoint's name if that has the prefix of a complete text
        model, else `name`."""
        source = self.sources.get(name, name)
        return source if source.startswith(self.prefix) else name

    def formats(self, model: BaseModelForCausalLM, config: QuantizationConfig) -> dict[str, Format]:
        """The format of every part that is quantised. Raises ValueError for patterns that match nothing. Raises
        NotImplementedError for patterns that match only matrices that stay floats."""
        self._check_patterns(model, config)
        model.quantize(config)
        found = {}
        for matrix in model.matrices():
            formats = matrix.plan.formats
            for part, _ in self.of(matrix):
                # Experts that share a tensor have one part each, named after that tensor.
                format = formats.get(part if part in matrix.parts else next(iter(matrix.parts)))
                if format and id(matrix) not in self.heads:
                    found[part] = format
        model.quantize(None)
        return found

    def _check_patterns(self, model: BaseModelForCausalLM, config: QuantizationConfig) -> None:
        names = {part: id(matrix) in self.heads for matrix in model.matrices() for part in matrix.parts}
        for pattern, format in config.overrides.items():
            matched = [is_head for name, is_head in names.items() if fnmatchcase(name, pattern)]
            if format and matched and all(matched):
                raise NotImplementedError(
                    f"overrides: {pattern!r} asks for {format.name} where keys and values are made of latents, "
                    f"which pace quantize leaves as floats; remove the pattern, or load the checkpoint with "
                    f"quantization instead"
                )


def rows_of_tensors(leaf: Linear | Vectors) -> dict[str, slice | Tensor]:
    """Names of the tensors that hold the rows of a product, or the elements of vectors. For each, its rows in the order
    of the tensor."""
    counts = leaf.parts if isinstance(leaf, Linear) else leaf.lengths
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}
    start = 0
    for part, count in counts.items():
        source = leaf.sources.get(part)
        ranges = source.rows if source else ()
        in_tensor = torch.cat([rows.indices(0, rows.count) for rows in ranges]) if ranges else torch.arange(count)
        pieces.setdefault(leaf.tensor(part), []).append((in_tensor, torch.arange(start, start + count)))
        start += count
    found: dict[str, slice | Tensor] = {}
    for name, parts in pieces.items():
        in_tensor, rows = map(torch.cat, zip(*parts))
        rows, first = rows[in_tensor.argsort()], int(rows.min())
        is_range = torch.equal(rows, torch.arange(first, first + len(rows)))
        found[name] = slice(first, first + len(rows)) if is_range else rows
    return found


def num_rows(rows: slice | Tensor) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
