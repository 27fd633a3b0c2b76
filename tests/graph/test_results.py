"""The caller owns a program's result: each run writes a new one, for every kind of last operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pace import _C
from pace.batch import NOT_FOUND, ForwardBatch, KVSpec, Positions, Spans
from pace.graph import Program
from pace.ops import native

WIDTH, LAYERS = 32, (Positions(1, 16, 16),)


def batch(token: int) -> ForwardBatch:
    def integers(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    spans = Spans(integers([0, 1], torch.int32), integers([1], torch.int32), integers([[0]], torch.int32))
    kv = KVSpec(LAYERS, torch.float32).allocate(4)
    return ForwardBatch(integers([token]), integers([0]), integers([1]), spans, integers([0]), integers([0]), kv)


class Ending:
    """The embedding of a token, and one operation."""

    def __init__(self, ending: Callable) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = native.empty_weight(WIDTH, WIDTH, torch.float32)
        native.pack_rows_(self.weight, torch.randn(WIDTH, WIDTH, generator=generator), 0)
        self.ending = ending

    def compute(self, ops, given, angles):
        return self.ending(ops, ops.embedding(given.tokens, self.weight)[given.logit_rows], self.weight)


def normed_and_read(ops, x, weight):
    y = ops.rms_norm(x, torch.ones(WIDTH), 1e-5)
    ops.linear(y, weight)
    return y


ENDINGS = {
    "rows": lambda ops, x, weight: x,
    "sum": lambda ops, x, weight: x + x,
    "activation": lambda ops, x, weight: ops.activation(x, "relu"),
    "norm": lambda ops, x, weight: ops.rms_norm(x, torch.ones(WIDTH), 1e-5),
    "norm that a product reads": normed_and_read,
    "product": lambda ops, x, weight: ops.linear(x, weight),
    "product and sum": lambda ops, x, weight: ops.linear(x, weight) + x,
}


@pytest.mark.parametrize("optimise", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
def test_each_run_has_a_result_of_its_own(ending: str, optimise: bool) -> None:
    model = Ending(ENDINGS[ending])
    program = Program(model, LAYERS, (), optimise=optimise)
    results = [program.run(batch(token), ()) for token in (3, 7, 11)]
    for token, result in zip((3, 7, 11), results):
        assert torch.equal(result, model.compute(native, batch(token), None))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_at_the_end_finds_the_largest_of_each_row(threads: int, restore_isa_and_threads) -> None:
    _C.set_num_threads(threads)
    vocabulary, num_tokens = 1000, 6
    tokens = torch.tensor([[5.0, 0], [-1.0, 0], [0, 0], [0, math.inf], [0, math.nan], [2.0, 3.0]])
    head = torch.stack([torch.arange(vocabulary) % 300, torch.ones(vocabulary)], 1).float()  # the largest repeats
    weights = [native.empty_weight(len(rows), 2, torch.float32) for rows in (tokens, head)]
    for weight, rows in zip(weights, (tokens, head)):
        native.pack_rows_(weight, rows, 0)

    class Head:
        def compute(self, ops, given, angles):
            return ops.linear(ops.embedding(given.tokens, weights[0])[given.logit_rows], weights[1])

    program = Program(Head(), (), ())
    for count in (num_tokens, 17):  # more than 16 rows are not searched
        each = torch.arange(count)
        step = replace(batch(0), tokens=each % num_tokens, logit_rows=each, kv=[], largest=torch.full((count,), 7))
        logits = program.run(step, ())
        assert step.largest.tolist() == [7] * count
        program.run(step, (), finds_largest=True)
        expected = native.argmax(logits) if count == num_tokens else torch.full((count,), NOT_FOUND)
        assert torch.equal(step.largest, expected)


def test_only_a_product_at_the_end_finds_the_largest() -> None:
    for ending in ENDINGS.values():
        model = Ending(ending)
        step = replace(batch(3), largest=torch.tensor([NOT_FOUND]))
        logits = Program(model, LAYERS, ()).run(step, (), finds_largest=True)
        assert step.largest.item() in (NOT_FOUND, native.argmax(logits).item())
