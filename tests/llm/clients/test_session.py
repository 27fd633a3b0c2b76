"""Sessions and scores: the logits depend only on the tokens, not on the order of appends, truncations and forks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pace.llm.clients.scoring import score
from pace.llm.clients.session import Session, append_each
from pace.llm.engine.driver import EngineDriver
from tests.llm.fake_model import FakeModel, make_engine
from tests.llm.generation.loaded import BACKENDS, load
from tests.llm.generators import check_idle


def expected(model: FakeModel, tokens: list[int], num_rows: int) -> torch.Tensor:
    return torch.stack([model.logits_of(tokens[: end + 1]) for end in range(len(tokens) - num_rows, len(tokens))])


@pytest.mark.parametrize("max_tokens, max_rows", [(None, None), (3, None), (None, 1), (6, 4)])
def test_rows_are_those_asked_for(max_tokens: int | None, max_rows: int | None) -> None:
    limits = {"max_tokens_per_step": max_tokens, "max_logit_rows_per_step": max_rows}
    driver = EngineDriver(make_engine(**{name: limit for name, limit in limits.items() if limit}))
    appended = [([1, 2, 3], "last", 1), ([4] * 20, "all", 20), ([5] * 9, 4, 4), ([6], "all", 1), ([7, 8], 2, 2)]
    with Session(driver) as session:
        for ids, wanted, num_rows in appended:
            rows = session.append(ids, wanted)
            assert torch.equal(rows, expected(driver.engine.model, session.tokens, num_rows))
    check_idle(driver)


def test_a_fork_computes_only_what_is_new() -> None:
    driver = EngineDriver(make_engine())
    engine, session = driver.engine, Session(driver)
    session.append([1] * 100)
    computed = []
    engine.model.hook = lambda batch: computed.append(len(batch.tokens))
    twin = session.fork()
    twin.append([2, 3])
    session.append([4])
    session.truncate(50)
    session.append([5])
    assert computed == [2, 1, 1]


def test_appends_of_several_sessions_share_steps() -> None:
    """The logits equal those of separate appends. If one append fails, all sessions stay unchanged."""
    driver = EngineDriver(make_engine())
    engine, sessions = driver.engine, [Session(driver) for _ in range(4)]
    rows = [[5], [7, 8, 9], [3] * 20, [6, 2]]
    steps = []
    engine.model.hook = lambda batch: steps.append(len(batch.tokens))
    logits = append_each(list(zip(sessions, rows)), "all")
    assert steps == [26] and [session.tokens for session in sessions] == rows
    for row, found in zip(rows, logits):
        assert torch.equal(found, expected(engine.model, row, len(row)))

    def fail(batch) -> None:
        raise RuntimeError("planted")

    engine.model.hook = fail
    with pytest.raises(RuntimeError, match="planted"):
        append_each([(session, [4]) for session in sessions])
    with pytest.raises(ValueError, match="token id"):
        append_each([(sessions[0], [4]), (sessions[1], [10**6])])
    engine.model.hook = lambda batch: None
    assert [session.tokens for session in sessions] == rows
    again = append_each([(session, [4]) for session in sessions])
    assert torch.equal(again[1], expected(engine.model, [*rows[1], 4], 1))


def test_a_session_forgotten_gives_its_blocks_back() -> None:
    driver = EngineDriver(make_engine())
    session = Session(driver)
    session.append([1] * 40)
    del session
    check_idle(driver)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_broken_append_leaves_the_session_as_it_was(error: type[BaseException]) -> None:
    driver = EngineDriver(make_engine(max_tokens_per_step=4))
    engine, session = driver.engine, Session(driver)
    session.append([1, 2, 3])
    calls = []

    def fail(batch) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error

    engine.model.hook = fail
    with pytest.raises(error):
        session.append([4] * 20, "all")
    assert session.tokens == [1, 2, 3]
    check_idle(driver, None)
    assert torch.equal(session.append([9]), expected(engine.model, [1, 2, 3, 9], 1))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_told_and_the_session_lives(wrong: float) -> None:
    driver = EngineDriver(make_engine())
    engine, session = driver.engine, Session(driver)
    honest = engine.model.logits_of
    engine.model.logits_of = lambda tokens: honest(tokens).index_fill(0, torch.tensor([7]), wrong)
    for wanted in ("last", "all", 2):
        with pytest.raises(ValueError, match="not finite"):
            session.append([1, 2, 3], wanted)
    engine.model.logits_of = honest
    assert session.tokens == [] and session.append([1]).shape == (1, 50)


def test_bad_arguments_are_told() -> None:
    session = Session(EngineDriver(make_engine()))
    for error, message, *bad in (
        (ValueError, "no token", []), (ValueError, "token id 50", [50]), (ValueError, "token id -1", [-1]),
        (ValueError, "4096", [1] * 5000), (TypeError, "string", "abc", b"ab"),
        (TypeError, "ints", [1.0], [True], None, np.ones((1, 2), dtype=np.int64), {"input_ids": [1]}),
        (TypeError, "integer tensor", torch.ones(2)),
    ):  # fmt: skip
        for ids in bad:
            with pytest.raises(error, match=message):
                session.append(ids)
    for logits in (0, 3, "first"):
        with pytest.raises(ValueError, match="logits must be"):
            session.append([1, 2], logits)
    assert session.tokens == []


def test_ids_of_any_kind_are_the_same_tokens() -> None:
    session = Session(EngineDriver(make_engine()))
    expected = session.append([3, 4])
    array, mixed = np.array([3, 4], dtype=np.int32), [np.int64(3), torch.tensor(4)]
    for ids in ((3, 4), torch.tensor([3, 4]), array, mixed, iter([3, 4])):
        session.truncate(np.int64(0))
        assert torch.equal(session.append(ids, np.int64(1)), expected) and session.tokens == [3, 4]
    assert session.append(np.int64(5)).shape == session.append(torch.tensor(5)).shape == (1, 50)


def test_truncate_and_close_are_told() -> None:
    session = Session(EngineDriver(make_engine()))
    for value, error in ((1, ValueError), (-1, ValueError), ("0", TypeError), (True, TypeError)):
        with pytest.raises(error, match="truncate"):
            session.truncate(value)
    session.close()
    session.close()
    for call in (lambda: session.append([1]), lambda: session.truncate(0), session.fork):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_scores_are_log_probabilities_of_the_next_token() -> None:
    driver = EngineDriver(make_engine(max_logit_rows_per_step=7))
    engine = driver.engine
    widest = []
    engine.model.hook = lambda batch: widest.append(len(batch.logit_rows))
    rows = [[1, 2, 3], [4], [5] * 60]
    for row, scores in zip(rows, score(driver, rows), strict=True):
        wanted = [engine.model.logits_of(row[: end + 1]).log_softmax(-1)[row[end + 1]] for end in range(len(row) - 1)]
        torch.testing.assert_close(scores, torch.tensor(wanted))
    assert max(widest) <= 7, "never all logits of a text at once"
    check_idle(driver)


def test_a_text_too_long_to_score_is_told() -> None:
    with pytest.raises(ValueError, match="text 1 has 5000"):
        score(EngineDriver(make_engine()), [[1], [1] * 5000])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sessions_and_scores_of_a_model_are_those_of_transformers(checkpoint, backend: str, family: str) -> None:
    folder, oracle, _ = checkpoint(family)
    model = load(folder, backend)
    ids = torch.randint(2, 280, (150,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = oracle(ids[None]).logits[0]
    session = model.session()
    rows = torch.cat([session.append(part, "all") for part in ids.split([1, 40, 16, 93])])
    assert (rows - logits).abs().max() < 1e-4 * logits.abs().max()
    scores = model.score(ids)[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(scores, wanted, atol=1e-3, rtol=1e-3)
    if backend == "native":
        again = model.session().append(ids, "all")
        assert torch.equal(again, rows), "bit by bit, in whatever pieces"
