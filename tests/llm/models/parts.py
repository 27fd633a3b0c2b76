"""The parts of the variants, and a few representative variants that together have all parts."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pace.llm.layers import Layer
from pace.llm.models.model_list import read_config
from pace.ops import reference
from tests.llm.models.variants import BASE, IDS, VARIANTS, config_fields

FIRST_OF_EACH = [next(name for name in IDS if name.startswith(f"{model_type}-")) for model_type in BASE]
"""The first variant of each family."""


@functools.cache
def parts_of(index: int) -> set[Any]:
    """Returns the mixers, feed-forwards, block structures, embeddings, norms and heads of a variant, without sizes."""
    model_type, _, fields = VARIANTS[index]
    model_class, config = read_config({"model_type": model_type, **config_fields(model_type, fields)})
    model = model_class(config, torch.float32, reference)
    found = {form(child) for child in model.children() if child not in model.layers}
    for layer in model.layers:
        branches = {name: form(part) for name, part in vars(layer).items() if name in ("mixer", "mlp")}
        others = tuple(form(part) for name, part in vars(layer).items() if name not in branches)
        found |= {*branches.items(), ("block", others)}
    return found


def form(value: Any) -> Any:
    """Returns the kind of a layer and of all its members, such as biases, tied matrices and factors of 1. Leaves out
    sizes, windows and names."""
    if isinstance(value, Layer):
        return type(value).__name__, *map(form, vars(value).values())
    if isinstance(value, (list, tuple)):
        return tuple(dict.fromkeys(map(form, value)))
    if isinstance(value, dict):
        return tuple(type(item).__name__ for item in value.values())
    if isinstance(value, bool):
        return value
    return value == 1.0 if isinstance(value, float) else type(value).__name__


@functools.cache
def with_new_parts() -> frozenset[str]:
    """Returns the representative variants with a part that no earlier representative one has. Together they have all
    parts."""
    found, seen = set(), set()
    for index, name in enumerate(IDS):
        if name in representative() and not (parts := parts_of(index)) <= seen:
            found.add(name)
            seen |= parts
    return frozenset(found)


@functools.cache
def representative() -> frozenset[str]:
    """Returns the first variant of each family, and every other variant with a part that no earlier one has."""
    found = dict.fromkeys(FIRST_OF_EACH)
    seen = set().union(*(parts_of(IDS.index(name)) for name in found))
    for index, name in enumerate(IDS):
        if name not in found and not (parts := parts_of(index)) <= seen:
            found[name] = None
            seen |= parts
    return frozenset(found)
