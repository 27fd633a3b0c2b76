"""Decides how each matrix of a model is stored: in the checkpoint's quantisation, in that of a QuantizationConfig, or
as floats."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pace.llm.layers import (
    Embedding,
    ExpertLinear,
    Layer,
    Linear,
    LMHead,
    SplitLMHead,
    TiedLMHead,
    WeightPlan,
    WeightTarget,
)
from pace.llm.layers.weight_target import check_targets
from pace.llm.loading.names import check_coverage, match_names
from pace.ops.weight_layout import WeightLayout
from pace.quant import Format, QuantizationConfig

if TYPE_CHECKING:
    from pace.llm.loading.fill import TensorReader
    from pace.llm.models.model import Model

logger = logging.getLogger("pace")


class StoredQuantized(NamedTuple):
    """Layout of a quantised tensor in a checkpoint, and its column order."""

    layout: WeightLayout
    order: Tensor | None


def plan_layout(model: Model, reader: TensorReader) -> tuple[dict[str, str], dict[str, list[WeightTarget]]]:
    """Decides how each matrix is stored, from the checkpoint's contents and `model.quantize`; allocates nothing.
    Returns the result of `match_names`, and the targets of the model's tensors. Raises ValueError if the tensors do not
    match the config."""
    model.stored_as = getattr(reader, "file_type", None)
    names = match_names(model, reader)
    shapes = {here: tuple(reader.tensors[name][1]) for name, here in names.items()}
    model.choose(shapes)
    targets = model.targets()
    check_coverage(model, reader, names, targets)  # first: it needs no memory for tensors of any size
    for name, claims in targets.items():
        check_targets(name, claims)
    if left_out := reader.tensors.keys() - names.keys():
        parts = sorted({name.removeprefix("model.").split(".")[0] for name in left_out})
        logger.info("left out %d tensors of %s: this model reads text only", len(left_out), ", ".join(parts))
    stored = {
        here: StoredQuantized(layout, reader.column_order(name))
        for name, here in names.items()
        if isinstance(layout := reader.tensors[name][0], WeightLayout) and here in targets
    }
    for warning in plan_weights(model, model.lm_head, model.quantization, stored):
        logger.warning("%s", warning)
    return names, targets


def split_head(model: Model, config: QuantizationConfig | None) -> None:
    """Gives an LM head that is the embedding a matrix of its own if `config` has different formats for the two. Undoes
    it for another config."""
    if isinstance(model.lm_head, SplitLMHead):
        (model.lm_head,) = model.lm_head.replaced
    if config and isinstance(model.lm_head, TiedLMHead) and config.splits(next(iter(model.lm_head.embedding.parts))):
        model.lm_head = SplitLMHead(model.lm_head)


def plan_weights(
    model: Model, lm_head: Layer | None, config: QuantizationConfig | None, stored: Mapping[str, StoredQuantized]
) -> list[str]:
    """Sets the plan of every matrix of a model, before it has memory. `stored`: the checkpoint's quantised tensors, by
    the names in `Layer.targets`.

    Returns warnings for the user. Tensors that are already quantised stay as they are; the config quantises the others.
    Raises ValueError for a config whose patterns match nothing, or that finds nothing left to quantise."""
    matrices = list(model.matrices())
    of_towers = {matrix for tower in model.towers for matrix in tower.matrices()}
    kinds = {
        part: "towers" if matrix in of_towers else _kind(matrix)
        for matrix in matrices
        if not matrix.keeps_floats
        for part in matrix.parts
    }
    formats = config.for_modules(kinds, isinstance(lm_head, TiedLMHead)) if config else {}
    tensors = {part: matrix.tensor(part) for matrix in matrices for part in matrix.parts}
    formats = {part: format for part, format in formats.items() if format and tensors[part] not in stored}
    if isinstance(lm_head, SplitLMHead) and (name := next(iter(lm_head.tensors()))) in stored:
        raise ValueError(
            f"{name} is the embedding and the LM head, and this checkpoint holds it as {stored[name].layout} already; "
            "give neither of the two a format"
        )
    warnings = []
    if config and stored:
        name, (layout, _) = next(iter(stored.items()))
        if not formats:
            raise ValueError(
                f"this checkpoint is already quantised ({name} as {layout}, and {len(stored) - 1} more tensors), and "
                f"quantising it again would lose more; load it without quantization, or give the original checkpoint"
            )
        warnings.append(
            f"{len(stored)} tensors of this checkpoint are quantised already and stay as they are ({name} as "
            f"{layout}, ...); {len(formats)} others are quantised now"
        )
    apart: dict[str, None] = {}
    for matrix in matrices:
        matrix.plan = _plan(matrix, formats, stored, apart)
    for stack in model.stacks():
        _make_alike(stack, formats, apart)
    return warnings + [
        (
            f"{parts} are one matrix here, whose inputs have one order: it has the values of the quantised ones, and "
            f"the size of floats"
        )
        for parts in apart
    ]


def _kind(matrix: Linear) -> str:
    """The kind of module, as `QuantizationConfig.for_modules` distinguishes them."""
    return "embedding" if isinstance(matrix, Embedding) else "lm_head" if isinstance(matrix, LMHead) else "format"


def _plan(
    matrix: Linear, formats: Mapping[str, Format], stored: Mapping[str, StoredQuantized], apart: dict[str, None]
) -> WeightPlan:
    """Plans one matrix. Parts with different column orders become floats, and so do gate and up if they cannot be two
    parts. A description of them is added to `apart`."""
    wanted = {part: formats[part].for_width(matrix.k) for part in matrix.parts if part in formats}
    found = [
        (matrix.takes_codes and stored.get(matrix.tensor(part)))
        or (StoredQuantized(wanted[part].layout, None) if part in wanted else None)
        for part in matrix.parts
    ]
    if not any(found):
        return WeightPlan()
    layouts = {name: part.layout for name, part in zip(matrix.parts, found) if part}
    plan = WeightPlan(layouts, wanted, next(part for part in found if part).order)
    alike = len({layouts.get(name) for name in matrix.parts}) == 1
    if _same_order(found) and (alike or not matrix.glu or len(matrix.parts) == 2):
        return plan
    apart[
        ", ".join(
            f"{name.rpartition('.')[2]} ({part.layout if part else 'floats'})"
            for name, part in zip(matrix.parts, found)
        )
    ] = None
    return WeightPlan(formats=wanted)


def _make_alike(stack: ExpertLinear, formats: Mapping[str, Format], apart: dict[str, None]) -> None:
    """Turns experts into floats if they are not all stored in one layout, or if their columns have an order."""
    plans = [expert.plan for expert in stack.experts]
    if len({tuple(plan.layouts.values()) for plan in plans}) == 1 and all(plan.order is None for plan in plans):
        return
    apart[f"{next(iter(stack.experts[0].parts))} and the other experts of its layer"] = None
    for expert in stack.experts:
        expert.plan = WeightPlan(
            formats={part: formats[part].for_width(stack.k) for part in expert.parts if part in formats}
        )


def _same_order(parts: list[StoredQuantized | None]) -> bool:
    orders = [part and part.order for part in parts]
    first = orders[0]
    return all(
        order is first or (order is not None and first is not None and torch.equal(order, first)) for order in orders
    )
