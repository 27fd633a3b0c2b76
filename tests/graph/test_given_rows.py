"""Programs whose rows are given, all of them or a few."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from pace.batch import ForwardBatch, GivenRows, Spans
from pace.graph import Program
from pace.ops import native
from tests.graph.test_results import LAYERS, WIDTH, Ending, batch

WIDE = 3 * WIDTH


def rows_of(count: int, width: int = WIDE, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


class Placed(Ending):
    """Embeddings with some rows replaced; a product; then rows are added to the same ones, twice."""

    def compute(self, ops, given, angles):
        x = ops.embedding(given.tokens, self.weight)
        if given.given is not None:
            ops.place_rows_(x, given.given.rows[:, :WIDTH], given.given.at, False)
        x = ops.linear(ops.rms_norm(x, torch.ones(WIDTH), 1e-5), self.weight, residual=x)
        if given.given is not None:
            for part in (1, 2):
                ops.place_rows_(x, given.given.rows[:, part * WIDTH : (part + 1) * WIDTH], given.given.at, True)
        return self.ending(ops, x[given.logit_rows], self.weight)


def tokens_batch(count: int, rows: torch.Tensor | None = None, at: list[int] | None = None) -> ForwardBatch:
    one, whole = batch(3), torch.arange(count)
    spans = Spans(torch.tensor([0, count]).int(), torch.tensor([count]).int(), torch.zeros(1, 1).int())
    given = None if rows is None else GivenRows(rows, torch.tensor(at, dtype=torch.int64))
    return ForwardBatch(whole % WIDTH, whole, whole, spans, whole, whole, one.kv, given)


@pytest.fixture
def placed() -> Placed:
    return Placed(lambda ops, x, weight: ops.linear(x, weight))


@pytest.mark.parametrize("optimise", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_program_has_the_bits_of_single_operations(placed, optimise, threads, restore_isa_and_threads) -> None:
    from pace import _C

    _C.set_num_threads(threads)
    program = Program(placed, LAYERS, (), optimise=optimise)
    steps = [tokens_batch(9), tokens_batch(9, rows_of(3), [1, 2, 8]), tokens_batch(9, rows_of(9, seed=1), [*range(9)])]
    results = [program.run(step, ()) for step in steps]
    for step, result in zip(steps, results):
        assert torch.equal(result, placed.compute(native, step, None))
    assert not torch.equal(results[0], results[1]) and torch.equal(results[0][[0, 3]], results[1][[0, 3]])


def test_a_step_without_given_rows_has_no_barrier_for_them(placed) -> None:
    plain = Program(Ending(lambda ops, x, weight: ops.linear(x, weight)), LAYERS, ())
    plain.run(tokens_batch(4), ())
    program = Program(placed, LAYERS, ())
    program.run(tokens_batch(4), ())
    without = program.num_barriers
    program.run(tokens_batch(4, rows_of(0), []), ())
    assert program.num_barriers == without
    program.run(tokens_batch(4, rows_of(1), [2]), ())
    assert program.num_barriers == without + 3


class Given(Ending):
    """A product of rows that are all given; the result has a row for each token."""

    def compute(self, ops, given, angles):
        x = ops.given_rows(given.given.rows[:, WIDTH : 2 * WIDTH])
        return ops.linear(x, self.weight, residual=ops.given_rows(given.given.rows[:, :WIDTH]))


def test_all_rows_may_be_given() -> None:
    model = Given(None)
    program = Program(model, (), ())
    for count in (5, 1, 40):
        step = tokens_batch(count, rows_of(count, seed=count), [*range(count)])
        step = replace(step, kv=[], logit_rows=step.logit_rows[:0])
        result = program.run(step, ())
        assert result.shape == (count, WIDTH) and torch.equal(result, model.compute(native, step, None))


def test_what_does_not_fit_is_refused_before_anything_is_computed(placed) -> None:
    program = Program(placed, LAYERS, ())
    for rows, at, message in [
        (rows_of(1, WIDTH), [2], f"have {WIDTH} columns; columns {WIDTH} to {2 * WIDTH} of them are needed"),
        (rows_of(1), [4], "row 4 of 4"),
        (rows_of(2), [1, 0], "must ascend"),
    ]:
        with pytest.raises(ValueError, match=message):
            program.run(tokens_batch(4, rows, at), ())
    with pytest.raises(ValueError, match="1 rows are given for 4 tokens"):
        Program(Given(None), (), ()).run(replace(tokens_batch(4, rows_of(1), [0]), kv=[]), ())
    assert torch.equal(program.run(tokens_batch(4), ()), placed.compute(native, tokens_batch(4), None))


def test_a_recorded_model_names_the_columns_it_reads() -> None:
    for indices in (lambda rows: rows[:, 3:], lambda rows: rows[:, 8:4], lambda rows: rows[1:3, :4]):

        class Wrong(Ending):
            def compute(self, ops, given, angles, indices=indices):
                return ops.given_rows(indices(given.given.rows))

        with pytest.raises(NotImplementedError, match="given rows are indexed by neighbouring columns"):
            Program(Wrong(None), (), ())


def test_programs_may_share_their_buffers(placed) -> None:
    """They run in turns, with other sizes, so that the memory moves."""
    first = Program(placed, LAYERS, ())
    second = Program(Given(None), (), (), neighbour=first)
    model = Given(None)
    for count in (3, 700, 3, 5000, 3):
        text = tokens_batch(3, rows_of(1), [1])
        tower = replace(tokens_batch(count, rows_of(count), [*range(count)]), kv=[])
        for _ in range(2):
            assert torch.equal(first.run(text, ()), placed.compute(native, text, None))
            assert torch.equal(second.run(tower, ()), model.compute(native, tower, None))
    assert first.buffer_bytes == second.buffer_bytes


def test_a_program_keeps_no_given_rows() -> None:
    program = Program(Given(None), (), ())
    step = replace(tokens_batch(4, rows_of(4), [*range(4)]), kv=[])
    program.run(step, ())
    rows = weakref.ref(step.given.rows)
    del step
    assert rows() is None
