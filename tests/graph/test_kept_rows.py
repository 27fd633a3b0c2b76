"""Programs that keep rows next to their result, and that put matrices side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pace.graph import Program
from pace.ops import native
from tests.graph.test_given_rows import rows_of, tokens_batch
from tests.graph.test_results import LAYERS, WIDTH, Ending


class Keeping(Ending):
    """Keeps embeddings, and a product of them next to given rows. Some columns stay between the two."""

    def compute(self, ops, batch, angles):
        x = ops.embedding(batch.tokens, self.weight)
        batch.kept[:, :WIDTH] = x
        given = ops.given_rows(batch.given.rows[:, : 2 * WIDTH])
        both = ops.concatenate(ops.linear(x, self.weight, residual=x), given[:, WIDTH:])
        batch.kept[:, 2 * WIDTH : 4 * WIDTH] = both
        return self.ending(ops, both[:, WIDTH:][batch.logit_rows], self.weight)


@pytest.fixture
def keeping() -> Keeping:
    return Keeping(lambda ops, x, weight: ops.linear(x, weight))


def kept(count: int, width: int = 5 * WIDTH) -> torch.Tensor:
    return torch.full((count, width), torch.nan)


@pytest.mark.parametrize("optimise", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_program_has_the_bits_of_single_operations(keeping, optimise, threads, restore_isa_and_threads) -> None:
    from pace import _C

    _C.set_num_threads(threads)
    program = Program(keeping, LAYERS, (), optimise=optimise)
    for count in (9, 1, 40):
        ours, theirs = (
            replace(tokens_batch(count, rows_of(count), [*range(count)]), kept=kept(count)) for _ in range(2)
        )
        assert torch.equal(program.run(ours, ()), keeping.compute(native, theirs, None))
        assert torch.equal(ours.kept.nan_to_num(9), theirs.kept.nan_to_num(9))
        assert ours.kept[:, WIDTH : 2 * WIDTH].isnan().all() and ours.kept[:, 4 * WIDTH :].isnan().all()
        assert torch.equal(ours.kept[:, 3 * WIDTH : 4 * WIDTH], ours.given.rows[:, WIDTH : 2 * WIDTH])


@pytest.mark.parametrize("rows", [None, kept(3), kept(4, 4 * WIDTH - 1)], ids=["none", "few", "narrow"])
def test_a_step_without_room_for_them_is_refused(keeping, rows) -> None:
    program = Program(keeping, LAYERS, ())
    step = replace(tokens_batch(4, rows_of(4), [*range(4)]), kept=rows)
    with pytest.raises(ValueError, match=r"the step keeps rows \[4, "):
        program.run(step, ())


def test_what_is_kept_must_fill_its_columns(keeping) -> None:
    def narrow(ops, batch, angles):
        batch.kept[:, : WIDTH + 1] = ops.embedding(batch.tokens, keeping.weight)

    keeping.compute = narrow
    with pytest.raises(NotImplementedError, match="recorded rows are kept in as many neighbouring columns"):
        Program(keeping, LAYERS, ())
