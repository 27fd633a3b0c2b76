"""`get_logits` follows guidance's rules: exact logits after any earlier calls, for any branch and from any thread."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pace.integrations.guidance import Pace
from pace.integrations.guidance.branches import Branch
from pace.integrations.guidance.engine import MAX_ROWS

FIRST = list(range(100, 150))


@pytest.fixture
def engine(model):
    engine = Pace(model, echo=False).engine
    yield engine
    engine.close()


def truth(model, ids):
    """Expected logits after each of `ids`."""
    with model.session() as session:
        return session.append(ids, "all")


def ask(engine, ids, every=False):
    """The rows of logits, and the number of cached tokens."""
    output = engine.get_logits(token_ids=ids, include_all_uncached_tokens=every)
    assert output["n_tokens"] == len(ids) and output["logits"].dtype == np.float32
    return torch.from_numpy(output["logits"]), output["n_cached"]


def test_one_row_or_all_that_were_not_cached(engine, model):
    rows = truth(model, FIRST)
    assert torch.equal(ask(engine, FIRST[:20])[0], rows[19:20])
    got, num_cached = ask(engine, FIRST[:30], every=True)
    assert num_cached == 20 and torch.equal(got, rows[19:30]), "and the row before, which was known"
    got, num_cached = ask(engine, FIRST[:30], every=True)
    assert num_cached == 30 and torch.equal(got, rows[29:30]), "the last row, and no forward pass"


def test_shorter_and_other_ends(engine, model):
    rows = truth(model, FIRST)
    ask(engine, FIRST)
    got, num_cached = ask(engine, FIRST[:20], every=True)
    assert num_cached == 19 and torch.equal(got, rows[19:20]), "a beginning: its last token is computed again"
    other = [*FIRST[:40], 7, 8, 9]
    got, num_cached = ask(engine, other, every=True)
    assert num_cached == 40 and torch.equal(got, truth(model, other)[40:])


def test_a_branch_keeps_its_tokens_when_another_parts_from_it(engine):
    one, two = [*FIRST, 7], [*FIRST, 8]
    ask(engine, one), ask(engine, two)
    for _ in range(3):
        one, two = [*one, 11, 12], [*two, 13]
        assert ask(engine, two)[1] == len(two) - 1
        assert ask(engine, one)[1] == len(one) - 2


def test_rows_are_bounded(engine, model):
    ids = [token % 2000 + 10 for token in range(MAX_ROWS + 40)]
    got, _ = ask(engine, ids, every=True)
    assert torch.equal(got, truth(model, ids)[-MAX_ROWS:])


def test_what_is_done_with_a_row_does_not_show_later(engine, model):
    for _ in range(2):
        row, _ = ask(engine, FIRST)
        row.fill_(0)
    assert torch.equal(ask(engine, FIRST)[0], truth(model, FIRST)[-1:])


def test_what_cannot_be_computed_is_refused(engine, model):
    with pytest.raises(ValueError, match="at least one"):
        engine.get_logits(token_ids=[])
    with pytest.raises(ValueError, match="1024"):
        engine.get_logits(token_ids=[5] * 1100)
    assert torch.equal(ask(engine, FIRST)[0], truth(model, FIRST)[-1:])
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.get_logits(token_ids=FIRST)


@pytest.mark.parametrize("most", [1, 2, 32])
def test_threads_get_their_own_logits(model, most):
    """Texts with common beginnings grow, diverge and shrink at random, in more threads than there are branches."""
    engine = Pace(model, echo=False, max_branches=most).engine

    def walk(seed):
        rng, ids = random.Random(seed), list(FIRST)
        for _ in range(12):
            if rng.random() < 0.3:
                ids = ids[: rng.randrange(1, len(ids))]
            ids = ids + [rng.randrange(10, 14) for _ in range(rng.randrange(1, 4))]
            every = rng.random() < 0.5
            rows, num_cached = ask(engine, ids, every)
            assert num_cached < len(ids) or len(rows) == 1
            yield list(ids), rows

    with ThreadPoolExecutor(4) as threads:
        walks = list(threads.map(lambda seed: list(walk(seed)), range(4)))
    engine.close()
    for ids, rows in (step for walked in walks for step in walked):
        assert torch.equal(rows, truth(model, ids)[-len(rows) :])


def test_the_beginning_that_two_share():
    rng, branch = random.Random(1), Branch()
    for _ in range(300):
        branch.tokens = [rng.randrange(2) for _ in range(rng.randrange(7))]
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 7))]
        same = next((k for k, pair in enumerate(zip(ids, branch.tokens)) if pair[0] != pair[1]), None)
        expected = min(len(ids), len(branch.tokens)) if same is None else same
        assert branch.num_shared(ids) == expected
        assert branch.begins(ids) == (expected == len(branch.tokens))
