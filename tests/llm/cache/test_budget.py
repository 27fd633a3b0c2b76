"""`kv_cache_bytes` bounds the memory of keys and values. It is checked early and changes no token."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from pace.assets import TINY
from pace.cli import main
from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading import checkpoint as checkpoint_module
from pace.llm.loading import load
from tests.llm.cache.test_dtype import prompts
from tests.llm.generators import check_idle
from tests.plugins.tiers import sample

BLOCK_TOKENS = 16
GREEDY = SamplingConfig(max_new_tokens=60, ignore_eos=True)


@functools.cache
def unbounded() -> LLMModel:
    return LLMModel(TINY, progress=False)


def block_bytes() -> int:
    return unbounded().memory_report().cache_budget // unbounded().memory_report().cache_tokens * BLOCK_TOKENS


def bounded(num_blocks: int, **arguments) -> LLMModel:
    return LLMModel(TINY, progress=False, kv_cache_bytes=num_blocks * block_bytes(), **arguments)


def steps_of(model: LLMModel, monkeypatch) -> list[int]:
    """Returns a list that collects the number of tokens of each later step."""
    steps, runner = [], model._engine.model
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: steps.append(len(batch.tokens)) or forward(batch))
    return steps


def test_the_budget_is_kept_and_reported() -> None:
    with bounded(9) as model:
        report = model.memory_report()
        assert (report.cache_budget, report.cache_tokens) == (9 * block_bytes(), 144)
        assert "cache, budget (144 tokens)" in str(report)
        model.generate(prompts(30, 50, 20, 100, 7), GREEDY)
        report = model.memory_report()
        assert report.cache_used == 0 < report.cache_touched <= 9 * block_bytes()
    assert (
        LLMModel(TINY, progress=False, kv_cache_bytes="1.5MiB").memory_report().cache_budget
        == 3 * 2**19 // block_bytes() * block_bytes()
    )


SAMPLED = {"do_sample": True, "seed": 3, "num_return_sequences": 2}
SMALL = [(7, {}), (10, SAMPLED), (16, {}), (7, SAMPLED), (10, {}), (16, SAMPLED)]


@pytest.mark.parametrize("case", sample(SMALL, lambda case: case in SMALL[:2]), ids=str)
def test_sequences_that_compete_for_a_small_cache_get_the_same_tokens(case: tuple[int, dict], monkeypatch) -> None:
    num_blocks, sampling = case
    rows, config = prompts(40, 3, 50, 17, 33, 48), GREEDY.copy().merge_from(SamplingConfig(**sampling))
    expected = unbounded().generate(rows, config)
    with bounded(num_blocks) as model:
        steps = steps_of(model, monkeypatch)
        session = model.session()  # an idle session gives up its blocks and is recomputed later
        before = session.append(rows[0])
        out = model.generate(rows, config)
        assert out.generated_token_ids == expected.generated_token_ids and out.finish_reasons == expected.finish_reasons
        num_samples = sampling.get("num_return_sequences", 1)
        assert sum(steps) > 40 + sum(num_samples * (len(row) + 59) for row in rows) - (num_samples - 1) * sum(
            map(len, rows)
        ), "something was computed twice"
        session.truncate(39)
        assert torch.equal(session.append(rows[0][39:]), before)
        session.close()
        assert [torch.equal(a, b) for a, b in zip(model.score(rows), unbounded().score(rows))] == [True] * 6
        check_idle(model)


def test_a_text_that_fills_the_cache_ends_with_length(caplog) -> None:
    (prompt,) = prompts(100)
    expected = unbounded().generate(prompt, GREEDY).generated_token_ids[0]
    with bounded(8) as model, caplog.at_level(logging.WARNING, "pace"):
        out = model.generate(prompt, GREEDY)
        assert out.finish_reasons == ["length"] and out.generated_token_ids == [expected[:28]]
        assert (
            "may reach 160 tokens; it ends with 'length' at 128" in caplog.text
            and f"kv_cache_bytes={10 * block_bytes()}" in caplog.text
        )


def test_what_can_never_fit_is_refused_before_anything_runs(monkeypatch) -> None:
    short, long = prompts(20, 128)
    with bounded(8) as model:
        steps = steps_of(model, monkeypatch)
        with pytest.raises(
            ValueError,
            match=(
                rf"prompt 1 has 128 tokens.* may have 128: the cache of .* KiB.* kv_cache_bytes={9 * block_bytes()} "
                rf".*or more"
            ),
        ):
            model.generate([short, long], GREEDY)
        with pytest.raises(
            ValueError, match=rf"text 0 has 130 tokens.* can score at most 129.*kv_cache_bytes={9 * block_bytes()} "
        ):
            model.score([long + [5, 5]])
        with model.session() as session:
            session.append(short)
            with pytest.raises(
                ValueError,
                match=rf"has 20 tokens, and 128 more would exceed .* of 128.*kv_cache_bytes={10 * block_bytes()} ",
            ):
                session.append(long)
        assert steps == [20]
    with bounded(9) as model:  # the size that the error message advises
        assert model.generate(long, SamplingConfig(max_new_tokens=2, ignore_eos=True)).output_token_ids.shape == (
            1,
            130,
        )


def test_the_tightest_bound_is_named() -> None:
    with bounded(8, max_seq_len=64) as model:
        with pytest.raises(ValueError, match=r"may have 64: the model was loaded with max_seq_len=64; raise it"):
            model.generate(prompts(64), GREEDY)
        with pytest.raises(ValueError, match=r"no more positions \(max_position_embeddings=1024\)"):
            model.generate(prompts(1024), GREEDY)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(kv_cache_bytes="2G"), ValueError, "kv_cache_bytes: .*KiB, MiB, GiB.*'2G'"),
        (dict(kv_cache_bytes=-1), ValueError, "kv_cache_bytes"),
        (dict(kv_cache_bytes=True), TypeError, "kv_cache_bytes"),
        (dict(kv_cache_bytes=1.5e9), TypeError, "kv_cache_bytes"),
        (dict(kv_cache_bytes=0), ValueError, "kv_cache_bytes=0 is too small: a block of 16 tokens takes"),
        (dict(kv_cache_bytes="100KiB", max_seq_len=1000), ValueError, "too small: max_seq_len=1000 tokens take"),
    ],
)
def test_budgets_that_make_no_sense_are_told_before_weights_are_read(
    arguments: dict, error: type[Exception], message: str, monkeypatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "CheckpointReader", lambda directory: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        LLMModel(TINY, progress=False, **arguments)


def test_max_seq_len_and_a_budget_that_just_holds_it_go_together() -> None:
    with bounded(4, max_seq_len=64) as model:
        assert model.generate(prompts(10), GREEDY).output_token_ids.shape == (1, 64)
    with pytest.raises(ValueError, match="too small"):
        bounded(4, max_seq_len=65)


def test_more_than_the_machine_has_is_warned_of(caplog, monkeypatch) -> None:
    monkeypatch.setattr(load, "available_memory_bytes", lambda kept=0: 1 << 20)
    with caplog.at_level(logging.WARNING, "pace"):
        LLMModel(TINY, progress=False, kv_cache_bytes="2MiB").close()
    assert "kv_cache_bytes=2MiB is more than the 1.0 MiB of free memory" in caplog.text


def test_the_command_line_has_it(capsys) -> None:
    assert main(["generate", "Once upon a time " * 100, "--kv-cache-bytes", "300KiB"]) == 1
    assert "--kv-cache-bytes=" in capsys.readouterr().err
    assert main(["generate", "Once", "--kv-cache-bytes", "lots"]) == 1
    assert "--kv-cache-bytes: a size is" in capsys.readouterr().err
