"""Packed weights in a file that is written once and then mapped: `WeightsFile`.

It has two uses. A copy of all matrices in the user's cache makes the second load immediate (`PackedCopy`). A mixture
whose experts are in a file may be larger than memory: `weights="mapped"` (`ExpertFile`).

The file is a sequence of page-aligned matrices in their memory layout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from pace import _C, __version__
from pace.checkpoints.files import PAGE_BYTES, Version
from pace.checkpoints.mapping import address_of
from pace.checkpoints.packed_file import make_head, open_packed
from pace.llm.layers import ExpertLinear, Layer, Linear
from pace.llm.loading import weights_cache
from pace.ops import native
from pace.ops.kernels.experts import ExpertStack
from pace.ops.weight import PackedWeight, Room
from pace.ops.weight_layout import WeightLayout, parts_of

logger = logging.getLogger("pace")

FORMAT = 2
"""Version of the file format; increased when the same plan of the same checkpoint gives other bytes."""
CONFIG_FILES = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that describe the checkpoint's codes."""

Matrix = Linear | ExpertLinear


@dataclass(frozen=True)
class WeightsFile:
    """A file of packed weights of a checkpoint."""

    checkpoint: Path
    """A directory, or a GGUF file."""
    folder: Path | None = None

    suffix: ClassVar[str]
    title: ClassVar[bytes]
    """The file's first line."""
    patience: ClassVar[float | None] = None
    """Seconds to wait for another process that writes the file; None for no limit."""
    one_per_build: ClassVar[bool] = False
    """True if each build of pace has its own file. Otherwise the last build that was used replaces it."""

    def choose(self, model: Layer) -> list[Matrix]:
        """Returns the matrices in the file; their plans must be set."""
        raise NotImplementedError

    def map(
        self,
        files: dict[Path, Version],
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        fill: Callable[[set[str]], object],
    ) -> set[str]:
        """Sets the matrices' weights to memory of the file. If the file must be written, `fill` fills the tensors of
        the given names. `files` hold the tensors, and `dtype` is the dtype of floats in memory. Returns the names of
        all tensors that need not be read any more. Raises the errors of `open_packed`."""
        tensors = set().union(*(matrix.tensors() for matrix in matrices))
        plan = [_describe(matrix, dtype) for matrix in matrices]
        head = make_head(self.describe(files, plan))
        sizes = [-(-matrix.matrix_nbytes(native, dtype) // PAGE_BYTES) * PAGE_BYTES for matrix in matrices]

        def over(mapping: mmap.mmap, is_packed: bool) -> Iterator[PackedWeight | ExpertStack]:
            """Yields the weights in the file."""
            room = Room(address_of(mapping), mapping, is_packed).at(len(head))
            for matrix, size in zip(matrices, sizes):
                yield _in_room(matrix, dtype, room)
                room = room.at(size)

        def write(mapping: mmap.mmap) -> None:
            for matrix, empty in zip(matrices, over(mapping, is_packed=False)):
                matrix.hold(native, empty)
            fill(tensors)

        found = open_packed(
            self.path(plan), head, sum(sizes), lambda mapping: self.use(mapping, over), write, self.patience
        )
        for matrix, weight in zip(matrices, found):
            matrix.in_file = weight
        return tensors

    def use(
        self, mapping: mmap.mmap, over: Callable[[mmap.mmap, bool], Iterator[PackedWeight | ExpertStack]]
    ) -> list[PackedWeight | ExpertStack]:
        """Returns the weights of a complete file. Raises ValueError if it does not hold them."""
        mapping.madvise(mmap.MADV_RANDOM)  # only the page of each matrix's header is read, without read-ahead
        found = list(over(mapping, True))
        mapping.madvise(mmap.MADV_NORMAL)
        return found

    def path(self, plan: list[object]) -> Path:
        """Path of the file. Each plan has its own file; another version of the checkpoint replaces it."""
        beside = self.checkpoint if self.checkpoint.is_dir() else self.checkpoint.parent
        key = [*plan, None if self.folder is None else str(self.checkpoint.resolve())]
        key += _build() if self.one_per_build else []
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        return (self.folder or beside) / f"{self.checkpoint.resolve().name}.{digest}{self.suffix}"

    def describe(self, files: dict[Path, Version], plan: list[object]) -> bytes:
        """Describes everything that the bytes of packed weights depend on."""
        if self.checkpoint.is_dir():
            configs = [path for name in CONFIG_FILES if (path := self.checkpoint / name).exists()]
            files = files | {path: Version.of(path) for path in configs}
        found = [(path.name, *version) for path, version in files.items()]
        about = {
            "format": FORMAT,
            "pace": _build(),
            "files": sorted(found),
            "matrices": plan,
        }
        source = json.dumps(str(self.checkpoint.resolve()))
        return b"\n".join((self.title, source.encode(), json.dumps(about).encode()))


class ExpertFile(WeightsFile):
    """The quantised experts, next to the checkpoint or in `folder`. The kernel prefetches the pages of chosen experts
    from the file."""

    suffix = ".experts"
    title = b"experts packed by pace"

    def choose(self, model: Layer) -> list[Matrix]:
        """Returns the quantised stacks of experts. Raises ValueError if there are none."""
        found = [stack for stack in model.stacks() if stack.is_quantised]
        if not found:
            raise ValueError(
                'weights="mapped" needs quantised experts, but those of this checkpoint are floats; use a quantised '
                "checkpoint or a GGUF file, or load with quantization='int4', for example"
            )
        return found


class PackedCopy(WeightsFile):
    """All matrices, in the user's cache. A copy only saves time: if there is no room for it, or it cannot be written,
    the model is loaded without it."""

    suffix = weights_cache.SUFFIX
    title = weights_cache.TITLE
    patience = 10.0
    one_per_build = True

    def choose(self, model: Layer) -> list[Matrix]:
        stacks = list(model.stacks())
        in_stacks = {id(expert) for stack in stacks for expert in stack.experts}
        return [*stacks, *(matrix for matrix in model.matrices() if id(matrix) not in in_stacks)]

    def map(
        self,
        files: dict[Path, Version],
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        fill: Callable[[set[str]], object],
    ) -> set[str]:
        """Like `WeightsFile.map`; returns no names if there is no copy."""
        if _C.cpu_info()["numa_nodes"] > 1:  # there, each page should be on the node of the thread that reads it
            return set()
        size = sum(matrix.matrix_nbytes(native, dtype) for matrix in matrices)
        path = self.path([_describe(matrix, dtype) for matrix in matrices])
        try:
            if not weights_cache.make_room(path, size):
                return set()
            tensors = super().map(files, matrices, dtype, fill)
        except OSError as error:
            logger.warning("loaded without a packed copy: %s", error)
            return set()
        weights_cache.mark_used(path)
        return tensors

    def use(
        self, mapping: mmap.mmap, over: Callable[[mmap.mmap, bool], Iterator[PackedWeight | ExpertStack]]
    ) -> list[PackedWeight | ExpertStack]:
        mapping.madvise(mmap.MADV_WILLNEED)  # all of it
        found = list(over(mapping, True))
        for weight in found:
            if isinstance(weight, ExpertStack):
                weight.is_mapped = False  # all pages are in memory, so no prefetch is needed
        return found


def check_has_experts(model: Layer) -> None:
    """Raises ValueError for a model without experts."""
    if not any(model.stacks()):
        raise ValueError(
            f'weights="mapped" needs a mixture of experts, but {type(model).__name__} has no experts; load with '
            'weights="memory"'
        )


def _build() -> list[object]:
    """Identifies this build of pace: its version, and the size and time of its kernels."""
    built = Path(_C.__file__).stat()
    return [__version__, built.st_size, built.st_mtime_ns]


def _in_room(matrix: Matrix, dtype: torch.dtype, room: Room) -> PackedWeight | ExpertStack:
    layout = matrix.storage(dtype)
    if isinstance(matrix, ExpertLinear):
        return ExpertStack(matrix.count, matrix.n, matrix.k, layout, matrix.glu, room)
    return PackedWeight(matrix.n, matrix.k, layout, matrix.glu, matrix.plan.order, room)


def _describe(matrix: Matrix, dtype: torch.dtype) -> dict[str, object]:
    """Describes a matrix's contents, given the checkpoint. Codes are the same bytes for every instruction set, floats
    are not."""
    layout, of_one = matrix.storage(dtype), matrix.experts if isinstance(matrix, ExpertLinear) else [matrix]
    formats = repr([sorted(map(repr, linear.plan.formats.items())) for linear in of_one])
    has_floats = any(not isinstance(part, WeightLayout) for _, part in parts_of(layout, matrix.n))
    return {
        "first": list(of_one[0].parts),
        "shape": [len(of_one), matrix.n, matrix.k],
        "layout": repr(layout),
        "formats": hashlib.sha256(formats.encode()).hexdigest(),
        "isa": _C.isa() if has_floats else None,
    }
