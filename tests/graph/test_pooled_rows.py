"""Programs that pool rows of texts and look up types of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pace.batch import ForwardBatch, Positions
from pace.graph import Program
from pace.llm.models.whole_spans import scratch, whole_spans
from pace.ops import native
from pace.ops.pooling import POOLINGS

LAYERS = (Positions(1, 16, 16),)
WIDTH = 48


def step(lengths: list[int]) -> ForwardBatch:
    """Texts of these lengths, with one row of logits each."""
    spans, slots = whole_spans(lengths)
    tokens = torch.arange(sum(lengths)) * 5 % 11
    ends = torch.tensor(lengths).cumsum(0) - 1
    kv = scratch(LAYERS[0], lengths)
    return ForwardBatch(tokens, tokens + 2, tokens + 1, spans, slots, ends, kv, types=tokens % 3)


class Pooled:
    """Rows of tokens, positions and types, pooled, then a product."""

    def __init__(self, poolings: tuple[str, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tables = [native.empty_weight(20, WIDTH, torch.float32) for _ in range(3)]
        for table in self.tables:
            native.pack_rows_(table, torch.randn(20, WIDTH, generator=generator), 0)
        self.weight = native.empty_weight(7, WIDTH * len(poolings), torch.float32)
        native.pack_rows_(self.weight, torch.randn(7, WIDTH * len(poolings), generator=generator), 0)
        self.poolings = poolings

    def compute(self, ops, batch, angles):
        x = ops.embedding(batch.tokens, self.tables[0]) + ops.embedding(batch.types + 4, self.tables[2])
        x = x + ops.embedding(batch.positions, self.tables[1])
        rows = ops.pool(x, batch.spans.query_start, self.poolings[0])
        for name in self.poolings[1:]:
            rows = ops.concatenate(rows, ops.pool(x, batch.spans.query_start, name))
        return ops.linear(rows, self.weight, activation="tanh")


@pytest.mark.parametrize("optimise", [True, False])
def test_pooled_rows(optimise: bool) -> None:
    for poolings in [(name,) for name in POOLINGS] + [POOLINGS]:
        model = Pooled(poolings)
        program = Program(model, LAYERS, (), optimise=optimise)
        for lengths in ([3], [1, 40, 2], [17, 17], [3]):
            batch = step(lengths)
            assert torch.equal(program.run(batch, ()), model.compute(native, batch, None)), (poolings, lengths)


def test_a_pooled_result() -> None:
    """Pooled rows may be the result of a program, which is another tensor in every run."""
    model = Pooled(("mean",))
    model.compute = lambda ops, batch, angles: ops.pool(
        ops.embedding(batch.types, model.tables[2]), batch.spans.query_start, "weightedmean"
    )
    program = Program(model, LAYERS, ())
    first, again = step([5, 9]), step([5, 9])
    results = [program.run(batch, ()) for batch in (first, again)]
    for result in results:
        assert torch.equal(result, model.compute(native, first, None))


def test_what_a_step_is_refused_for() -> None:
    program = Program(Pooled(("mean",)), LAYERS, ())
    batch = step([3, 4])
    with pytest.raises(ValueError, match="needs a logit row for each span; got 1 for 2"):
        program.run(replace(batch, logit_rows=batch.logit_rows[:1]), ())
    with pytest.raises(ValueError, match="the batch has no `types`"):
        program.run(replace(batch, types=None), ())
    with pytest.raises(ValueError, match="id"):
        program.run(replace(batch, types=batch.types + 20), ())
