"""Refuses weights that do not fit into memory: `check_memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pace.llm.loading.packed_weights import ExpertFile
from pace.memory import available_memory_bytes
from pace.ops import native

if TYPE_CHECKING:
    from pace.llm.models.model import Model


def check_memory(model: Model) -> None:
    """Raises MemoryError if the weights need more than the available memory, except those of an ExpertFile. Otherwise
    the system would end the process. The plans of the matrices must be set."""
    ops, dtype = model.ops, model.dtype
    mapped = model.weights_file.choose(model) if isinstance(model.weights_file, ExpertFile) else []
    mapped_bytes = sum(stack.matrix_nbytes(ops, dtype) for stack in mapped)
    needed, available = model.planned_nbytes(ops, dtype) - mapped_bytes, available_memory_bytes()
    if needed <= available:
        return
    kind, advice = f"as {str(dtype).removeprefix('torch.')}", ""
    if any(matrix.plan.layouts for matrix in model.matrices()):
        kind = "in quantised form"
    elif dtype == torch.float32:
        advice = "load with dtype=bfloat16, which takes half, or quantization='int4', an eighth; or "
    else:
        advice = "load with quantization='int4', which takes a quarter; or "
    mappable = sum(stack.matrix_nbytes(ops, dtype) for stack in model.stacks() if stack.is_quantised and not mapped)
    if mapped:
        kind += f" without {mapped_bytes / 2**30:.2f} GiB of mapped experts"
    elif ops is native and 0 < needed - mappable <= available:
        advice = f'load with weights="mapped", which leaves {mappable / 2**30:.2f} GiB of experts in a file; or '
    raise MemoryError(
        f"the weights take {needed / 2**30:.2f} GiB {kind}, but only {available / 2**30:.2f} GiB of memory are free; "
        f"{advice}free some memory or use a smaller model"
    )
