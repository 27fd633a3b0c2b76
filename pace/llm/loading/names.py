"""Matches the tensors of a checkpoint with those of a model: `match_names`, then `check_coverage`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pace.llm.layers import LMHead, SplitLMHead, TiedLMHead, WeightTarget
from pace.llm.layers.base import FLOAT_DTYPES
from pace.llm.layers.weight_target import Piece
from pace.naming import listed
from pace.ops.blocks import BlockRows
from pace.ops.weight_layout import QuantizedRows, WeightLayout

if TYPE_CHECKING:
    from pace.llm.loading.fill import TensorReader
    from pace.llm.models.model import Model

logger = logging.getLogger("pace")


def match_names(model: Model, reader: TensorReader) -> dict[str, str]:
    """Returns name in the checkpoint -> name in the model, without the tensors of `other_parts` that no tower has.
    Unties the head if the checkpoint has two different matrices. Drops towers and an optional head that it does not
    have."""
    names = {name: name_in_model(model, name) for name in reader.tensors}
    model.towers = [tower for tower in model.towers if any(here.startswith(tower.prefix) for here in names.values())]
    of_towers = tuple(tower.prefix for tower in model.towers)
    names = {
        name: here
        for name, here in names.items()
        if here.startswith(of_towers) or not name.startswith(model.other_parts)
    }
    if not any(here.startswith(model.prefix) for here in names.values()):
        whole = (*model.outside, *of_towers)
        names = {name: here if here.startswith(whole) else model.prefix + here for name, here in names.items()}
    if type(model.lm_head) is LMHead and model.has_optional_head:
        has_head = any(here.startswith("lm_head.") for here in names.values())
        model.lm_head = model.lm_head if has_head else None
    if isinstance(model.lm_head, (TiedLMHead, SplitLMHead)):
        sources = {here: name for name, here in names.items()}
        head, embedding = sources.get("lm_head.weight"), sources.get(f"{model.embedding_name}.weight")
        if head and not embedding:
            names[head] = f"{model.embedding_name}.weight"  # only one of the two was saved, under the other name
        elif head and _differ(reader, head, embedding):
            logger.warning("tie_word_embeddings is true, but %s and %s differ: they are not tied", head, embedding)
            bias = bool(model.lm_head.bias.lengths)
            model.lm_head = LMHead("lm_head", model.config.vocab_size, model.embedding.k, bias)
    return names


def name_in_model(model: Model, name: str) -> str:
    """Returns the model's name for a tensor of a checkpoint that is not a bare decoder."""
    for prefix, here in model.text_prefixes.items():
        if name.startswith(prefix):
            name = here + name.removeprefix(prefix)
            break
    for pattern, here in model.other_names.items():
        name = re.sub(pattern, here, name)
    return name


def _differ(reader: TensorReader, head: str, embedding: str) -> bool:
    """True if the head differs from the embedding. Like transformers, treats two equal matrices as one, because `.bin`
    files save both."""
    if reader.tensors[head] != reader.tensors[embedding]:
        return True
    for start, stop in reader.row_ranges(head):
        a, b = reader.read(head, start, stop), reader.read(embedding, start, stop)
        differ = not _equal(a, b)
        del a, b
        reader.release(head, start, stop)
        reader.release(embedding, start, stop)
        if differ:
            return True
    return False


def _equal(a: Piece, b: Piece) -> bool:
    """Compares tensors of the same dtype and shape, or rows in the same layout."""
    if isinstance(a, BlockRows):
        return torch.equal(a.data, b.data)
    if isinstance(a, QuantizedRows):
        return all(
            one is other or (one is not None and other is not None and torch.equal(one, other))
            for one, other in zip(a.tensors(), b.tensors())
        )
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def check_coverage(
    model: Model,
    reader: TensorReader,
    names: Mapping[str, str],
    targets: Mapping[str, list[WeightTarget]],
) -> None:
    """Raises ValueError unless every target has one tensor of its shape, and every tensor has a target or a reason to
    be ignored. `names`: the result of `match_names`."""
    ignored = list(model.ignored())
    if isinstance(model.lm_head, (TiedLMHead, SplitLMHead)):
        # A tied int8 head, for which transformers needs the scales twice (pace/calibrate/encoding.py).
        ignored.append(r"lm_head\.weight(_scale)?")
    unexpected, wrong = [], []
    for name, here in names.items():
        dtype, shape = reader.tensors[name]
        if here not in targets:
            if not any(re.fullmatch(pattern, here) for pattern in ignored) and not _is_unused_bias(reader, name):
                unexpected.append(name)
            continue
        target = targets[here][0]
        if target.transposed and isinstance(dtype, WeightLayout):
            raise NotImplementedError(
                f"{name} is stored as {dtype}, but the model needs it transposed, which works only for floats; load "
                "the float checkpoint"
            )
        if tuple(shape) != target.stored_shape:
            wrong.append(f"{name} has shape {list(shape)}, the config demands {list(target.stored_shape)}")
        elif dtype not in FLOAT_DTYPES and (target.is_vector or not isinstance(dtype, WeightLayout)):
            wrong.append(f"{name} is {dtype}, not a floating-point tensor")
    problems = {
        "missing": sorted(targets.keys() - names.values()),
        "unexpected": sorted(unexpected),
        "not as the config demands": wrong,
    }
    if lines := [f"{title} ({len(found)}): {listed(found)}" for title, found in problems.items() if found]:
        raise ValueError(
            f"the checkpoint does not fit {type(model).__name__} as config.json describes it:\n  " + "\n  ".join(lines)
        )


def _is_unused_bias(reader: TensorReader, name: str) -> bool:
    """True for zeros that early writers of GPTQ, and some of Cohere's, stored as the bias of modules without one."""
    module = name.removesuffix(".bias")
    if module == name or f"{module}.weight" not in reader.tensors or reader.tensors[name][0] not in FLOAT_DTYPES:
        return False
    return not reader.read(name).any()
