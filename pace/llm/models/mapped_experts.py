"""Experts that stay in a file: packed once, then mapped, so that a mixture may be larger than memory
(`weights="mapped"`).

The file holds all stacks of experts that are stored quantised, one after the other, each as it would lie in memory. So
it serves every instruction set.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pace import __version__
from pace.checkpoints.mapping import address_of
from pace.checkpoints.packed_file import make_head, open_packed
from pace.llm.layers import ExpertLinear, Layer
from pace.ops import native
from pace.ops.kernels.experts import ExpertStack
from pace.ops.weight import Room

FORMAT = 1
"""Of the file; another number wherever the same plan of the same checkpoint means other bytes."""
CONFIG = "config.json"
"""Says how codes are to be read."""


@dataclass(frozen=True)
class ExpertCache:
    """Where the packed experts of a checkpoint are kept."""

    checkpoint: Path
    """A directory, or a GGUF file."""
    folder: Path | None = None
    """None for beside the checkpoint."""

    def path(self, plan: list[object]) -> Path:
        """Each plan has a file of its own; one of another version of the checkpoint takes its place."""
        beside = self.checkpoint if self.checkpoint.is_dir() else self.checkpoint.parent
        key = [*plan, None if self.folder is None else str(self.checkpoint.resolve())]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        return (self.folder or beside) / f"{self.checkpoint.resolve().name}.{digest}.experts"

    def describe(self, files: list[Path], plan: list[object]) -> bytes:
        """All that the bytes of packed experts depend on; `files` hold the tensors."""
        files = [*files, self.checkpoint / CONFIG] if self.checkpoint.is_dir() else files
        found = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in (file.stat(),)]
        about = {"format": FORMAT, "pace": __version__, "checkpoint": sorted(found), "stacks": plan}
        return b"experts packed by pace\n" + json.dumps(about).encode()


def check_has_experts(model: Layer) -> None:
    """Raises ValueError for a model without any."""
    if not any(model.stacks()):
        raise ValueError(
            f'weights="mapped" maps the experts of a mixture, and {type(model).__name__} has none; load with weights="memory"'
        )


def mapped_stacks(model: Layer) -> list[ExpertLinear]:
    """The stacks that a file can hold. Raises ValueError where there are none."""
    found = [stack for stack in model.stacks() if stack.is_quantised]
    if not found:
        raise ValueError(
            'weights="mapped" maps experts that are stored quantised, and those of this checkpoint are floats; take a '
            "quantised checkpoint or a GGUF file, or load with quantization='int4', say"
        )
    return found


def map_experts(
    cache: ExpertCache, files: list[Path], stacks: list[ExpertLinear], fill: Callable[[set[str]], object]
) -> set[str]:
    """Maps `stacks`, which have their plans, from the cache's file; `fill` fills the tensors of these names, where the
    file has to be written. Returns the names of all tensors that need not be read any more. Raises what `open_packed`
    does."""
    tensors = set().union(*(stack.tensors() for stack in stacks))
    plan = [_describe(stack) for stack in stacks]
    head = make_head(cache.describe(files, plan))
    layouts = [stack.storage(torch.float32) for stack in stacks]  # of codes, whatever the dtype of floats
    sizes = [stack.stack_nbytes(native, torch.float32) for stack in stacks]

    def over(mapping: mmap.mmap, is_packed: bool) -> list[ExpertStack]:
        """The stacks in the file."""
        room = Room(address_of(mapping), mapping, is_packed).at(len(head))
        found = []
        for stack, layout, size in zip(stacks, layouts, sizes):
            found.append(ExpertStack(stack.count, stack.n, stack.k, layout, stack.glu, room))
            room = room.at(size)
        return found

    def use(mapping: mmap.mmap) -> list[ExpertStack]:
        mapping.madvise(mmap.MADV_RANDOM)  # of each expert the page of its header, and not what follows it
        found = over(mapping, is_packed=True)
        mapping.madvise(mmap.MADV_NORMAL)
        return found

    def write(mapping: mmap.mmap) -> None:
        for stack, empty in zip(stacks, over(mapping, is_packed=False)):
            stack.hold(native, empty)
        fill(tensors)

    mapped = open_packed(cache.path(plan), head, sum(sizes), use, write)
    for stack, found in zip(stacks, mapped):
        stack.mapped = found
    return tensors


def _describe(stack: ExpertLinear) -> dict[str, object]:
    """What a stack holds, given the checkpoint."""
    formats = repr([sorted(map(repr, expert.plan.formats.values())) for expert in stack.experts])
    return {
        "first": list(stack.experts[0].parts),
        "shape": [stack.count, stack.n, stack.k],
        "layout": repr(stack.storage(torch.float32)),
        "formats": hashlib.sha256(formats.encode()).hexdigest(),
    }
