"""Embedding of token ids, and the LM head that computes logits. If the two are tied, the matrix exists once. A
`FileEmbedding` has no memory: its rows are read from the checkpoint when they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.linear import Linear
from pace.llm.layers.weight_target import TensorSource, WeightTarget
from pace.ops.file_table import FileTable
from pace.ops.protocol import ForwardOps


class Embedding(Linear):
    """`[T, K]`: rows of the matrix `{name}.weight [num_rows, K]`. It is stored like the weight of a product, so that an
    LM head can share it."""

    def __init__(self, name: str, num_rows: int, k: int):
        super().__init__({name: num_rows}, k)

    def __call__(self, ops: ForwardOps, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight)


class FileEmbedding(Layer):
    """`[T, K]`: rows of the matrix `{name}.weight [num_rows, K]`, which stays in the checkpoint's file, in any format.
    A token only needs its own row, so a table of gigabytes costs a few pages of it for each token."""

    operator = "embedding"

    def __init__(self, name: str, num_rows: int, k: int):
        self.name = f"{name}.weight"
        self.num_rows = num_rows
        self.k = k
        self.table: FileTable | None = None
        """Set when the checkpoint is loaded."""

    def __call__(self, ops: ForwardOps, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.table)

    def targets(self) -> dict[str, list[WeightTarget]]:
        return {self.name: [WeightTarget((self.num_rows, self.k), _never_filled)]}

    def tables(self) -> Iterator[FileEmbedding]:
        yield self

    @property
    def num_weights(self) -> int:
        return self.num_rows * self.k

    @property
    def file_nbytes(self) -> int:
        """Bytes of the table in its file."""
        return 0 if self.table is None else self.table.nbytes


def _never_filled(piece: object, start: int) -> None:
    raise AssertionError("a table in a file takes no rows")


class LMHead(Linear):
    """Logits `[R, V]` of `x [R, K]`, with its own matrix."""

    operator = "lm_head"

    def __init__(self, name: str, vocab_size: int | TensorSource, k: int, bias: bool = False):
        super().__init__({name: vocab_size}, k, bias)


class TiedLMHead(Layer):
    """Logits `[R, V]` of `x [R, K]` with the matrix of an embedding; only an optional bias is its own."""

    operator = "lm_head"

    def __init__(self, name: str, embedding: Embedding, vocab_size: int, bias: bool = False):
        self.embedding = embedding
        self.bias = Vectors({f"{name}.bias": vocab_size} if bias else {})

    def children(self) -> Iterator[Layer]:
        yield self.bias

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return ops.linear(x, self.embedding.weight, self.bias.values)


class SplitLMHead(LMHead):
    """Logits `[R, V]` of `x [R, K]` with a second copy of the embedding's matrix, in a format of its own. It replaces
    `tied`."""

    def __init__(self, tied: TiedLMHead):
        embedding = tied.embedding
        ((part, num_rows),) = embedding.parts.items()
        source = embedding.sources.get(part) or TensorSource((num_rows, embedding.k))
        source = replace(source, tensor=embedding.tensor(part))
        super().__init__("lm_head", source, embedding.k, bool(tied.bias.lengths))
        self.replaced = (tied,)
        """The head before the split, which is no child."""

    def targets(self) -> dict[str, list[WeightTarget]]:
        shared = self.tensors()
        return {
            name: [replace(target, is_copy=name in shared) for target in found]
            for name, found in super().targets().items()
        }
