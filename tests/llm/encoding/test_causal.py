"""Rows and answers of causal models: against transformers, by equal bits, and by counting what is computed."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import torch

from pace.llm import EmbeddingModel, LLMModel
from pace.llm.encoding.causal import common_prefix
from pace.llm.encoding.embedder import LOGITS, TextTokens
from tests.llm.encoding.checkpoints import save_causal
from tests.plugins.tiers import sample
from tests.waiting import Gate

pytest.importorskip("transformers")

LAST = ("lasttoken",)
ALL = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
LENGTHS = (1, 2, 15, 16, 17, 33, 130)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save_causal(folder)


@pytest.fixture(scope="module")
def model(saved):
    with LLMModel(saved[0], dtype="float32", progress=False, kv_cache_bytes="64MiB") as model:
        yield model


@pytest.fixture
def embedder(model):
    return model.embedding_model.embedder


def random_texts(lengths=LENGTHS) -> list[TextTokens]:
    random = np.random.default_rng(3)
    return [TextTokens(tuple(random.integers(0, 200, length).tolist())) for length in lengths]


@torch.no_grad()
def oracle_rows(oracle, text: TextTokens) -> torch.Tensor:
    return oracle.base_model(torch.tensor([text.tokens])).last_hidden_state[0]


class Counted:
    """Counts the tokens and the rows of logits that an engine computes."""

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch):
        self.tokens = self.heads = 0
        forward, rows, logits = runner.forward, runner.final_rows, runner.logits

        def counting(call, has_head):
            def run(batch):
                self.tokens += len(batch.tokens)
                self.heads += has_head * len(batch.logit_rows)
                return call(batch)

            return run

        def count_logits(some):
            self.heads += len(some)
            return logits(some)

        monkeypatch.setattr(runner, "forward", counting(forward, 1))
        monkeypatch.setattr(runner, "final_rows", counting(rows, 0))
        monkeypatch.setattr(runner, "logits", count_logits)


def test_rows_are_those_of_transformers(saved, embedder):
    texts = random_texts()
    found = embedder.rows(texts, LAST)
    for text, row in zip(texts, found, strict=True):
        expected = oracle_rows(saved[1], text)[-1]
        assert (row - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert embedder.rows([], LAST).shape == (0, 32)


def test_every_pooling_has_the_bits_of_its_rows(saved, embedder):
    text = random_texts()[5]
    found = embedder.rows([text], ALL)[0].view(len(ALL), 32)
    rows = torch.cat([embedder.rows([TextTokens(text.tokens[: end + 1])], LAST) for end in range(len(text))])
    weights = torch.arange(1, len(text) + 1.0)[:, None]
    means = [rows.mean(0), rows.sum(0) / len(text) ** 0.5, (rows * weights).sum(0) / weights.sum()]
    assert torch.equal(found[0], rows[0]) and torch.equal(found[5], rows[-1])
    assert torch.equal(found[1], rows.amax(0))
    for one, expected in zip(found[2:5], means):
        assert (one - expected).abs().max() < 33 * torch.finfo().eps * rows.abs().sum(0).max()


def test_rows_have_the_same_bits_alone_in_any_batch_and_in_chunks(saved, embedder):
    texts = random_texts()
    alone = torch.cat([embedder.rows([text], LAST) for text in texts])
    assert torch.equal(embedder.rows(texts[::-1] * 2, LAST), alone.flip(0).repeat(2, 1))
    pooled = embedder.rows(texts, ("mean",))
    options = {"prefix_cache_bytes": 0, "kv_cache_bytes": "64MiB", "num_threads": 1}
    with LLMModel(saved[0], dtype="float32", progress=False, **options) as other:
        other.generator.engine.scheduler.max_tokens_per_step = 7
        assert torch.equal(other.embedding_model.embedder.rows(texts, LAST), alone)
        assert torch.equal(other.embedding_model.embedder.rows(texts, ("mean",)), pooled)
    with LLMModel(saved[0], dtype="float32", progress=False, backend="native-eager", kv_cache_bytes="64MiB") as other:
        assert torch.equal(other.embedding_model.embedder.rows(texts, LAST), alone)


def test_texts_run_in_the_steps_of_generations_without_the_head(model, embedder, monkeypatch):
    texts = random_texts()
    prompts = [list(text.tokens) for text in texts[:3]]
    rows = embedder.rows(texts, LAST)
    expected = model.generate(prompts, max_new_tokens=24, do_sample=False, ignore_eos=True).generated_token_ids
    counted = Counted(model.generator.engine.model, monkeypatch)
    assert torch.equal(embedder.rows(texts, LAST), rows) and counted.heads == 0
    requests = [model.add_request(prompt, max_new_tokens=24, do_sample=False, ignore_eos=True) for prompt in prompts]
    while not any(request.done for request in requests):
        assert torch.equal(embedder.rows(texts, LAST), rows)
    assert [request.result().generated_token_ids[0] for request in requests] == expected
    assert counted.heads == 3 * 24


def test_a_common_beginning_is_computed_once(saved, monkeypatch):
    random = np.random.default_rng(5)
    start, ends = random.integers(0, 200, 150).tolist(), random.integers(0, 200, (20, 9)).tolist()
    texts = [TextTokens((*start, 201 + index, *end)) for index, end in enumerate(ends)]
    for options in ({}, {"prefix_cache_bytes": 0}, {"kv_cache_type": "bmc"}):
        with LLMModel(saved[0], dtype="float32", progress=False, kv_cache_bytes="64MiB", **options) as model:
            embedder = model.embedding_model.embedder
            counted = Counted(model.generator.engine.model, monkeypatch)
            together = embedder.submit_answers(texts, (1, 2)).result(60)
            assert counted.tokens == 150 + 1 + 20 * 10
            assert counted.heads == 20
            alone = torch.cat([embedder.submit_answers([text], (1, 2)).result(60) for text in texts])
            assert torch.equal(together, alone)
            model.generator.driver.call(lambda engine: engine.check_idle()).result(60)


def test_a_classifier_computes_a_common_beginning_once(tmp_path, monkeypatch):
    save_causal(tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    random = np.random.default_rng(6)
    start, ends = random.integers(0, 200, 50).tolist(), random.integers(0, 200, (8, 5)).tolist()
    with EmbeddingModel(tmp_path, progress=False, prefix_cache_bytes=0, kv_cache_bytes="64MiB") as model:
        counted = Counted(model.embedder.driver.engine.model, monkeypatch)
        for num_common, num_tokens in ((50, 51 + 8 * 6), (3, 8 * 9)):
            texts = [TextTokens((*start[:num_common], 201 + index, *end)) for index, end in enumerate(ends)]
            counted.tokens = 0
            together = model.logits_of(texts)
            assert counted.tokens == num_tokens
            assert torch.equal(torch.cat([model.logits_of([text]) for text in texts]), together)
        assert counted.heads == 0


def test_texts_of_different_salts_share_no_prefix(saved, monkeypatch):
    start = np.random.default_rng(5).integers(0, 200, 64).tolist()
    with LLMModel(saved[0], dtype="float32", progress=False, kv_cache_bytes="64MiB") as model:
        embedder, counted = model.embedding_model.embedder, Counted(model.generator.engine.model, monkeypatch)
        rows = []
        for end, salt in enumerate((None, "a", "b", "a", None)):
            rows.append(embedder.rows([TextTokens((*start, 201 + end), cache_salt=salt)], LAST))
        assert counted.tokens == 3 * 65 + 2
        assert torch.equal(embedder.rows([TextTokens((*start, 203), cache_salt="c")], LAST), rows[2])


def test_scores_of_answers(saved, embedder):
    texts = random_texts()
    found = embedder.submit_answers(texts, (7, 9)).result(60)
    alone = embedder.submit_answers(texts, (7, None)).result(60)
    for text, score, first in zip(texts, found, alone, strict=True):
        with torch.no_grad():
            logits = saved[1](torch.tensor([text.tokens])).logits[0, -1]
        assert score.item() == pytest.approx((logits[7] - logits[9]).item(), abs=1e-4)
        assert first.item() == pytest.approx(logits[7].item(), abs=1e-4)
    assert embedder.submit_answers([], (7, 9)).result().shape == (0, 1)


def test_common_prefixes_leave_a_token_of_each():
    assert common_prefix([(1, 2, 3), (1, 2, 4)]) == 2
    assert common_prefix([(1, 2), (1, 2, 4)]) == 1
    assert common_prefix([(1, 2), (1, 2)]) == 1
    assert common_prefix([(3, 2), (1, 2)]) == 0
    assert common_prefix([(5,)]) == 0


def test_what_is_refused(embedder):
    for message, call in [
        ("text 0 has no tokens", lambda: embedder.submit([TextTokens(())], LAST)),
        (
            "text 1 has 600 tokens, more than the 512",
            lambda: embedder.rows([TextTokens((1,)), TextTokens((1,) * 600)], LAST),
        ),
        ("token id 999", lambda: embedder.submit([TextTokens((999,))], LAST)),
        ("token type 1", lambda: embedder.submit([TextTokens((1,), (1,))], LAST)),
        ("no classifier", lambda: embedder.submit([TextTokens((1,))], LOGITS)),
        ("first", lambda: embedder.submit([TextTokens((1,))], ("first",))),
        ("a tuple of one or more names", lambda: embedder.submit([TextTokens((1,))], "mean")),
        ("answers must be ids", lambda: embedder.submit_answers([TextTokens((1,))], (1, 999))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_cancelling_and_closing(saved):
    model = LLMModel(saved[0], dtype="float32", progress=False, kv_cache_bytes="64MiB")
    embedder, driver = model.embedding_model.embedder, model.generator.driver
    gate = Gate()
    driver.call(gate)
    gate.wait_inside()
    futures = [embedder.submit(random_texts(), LAST) for _ in range(3)]
    answers = embedder.submit_answers(random_texts(), (1, 2))
    assert futures[0].cancel() and answers.cancel()
    gate.open()
    assert torch.equal(futures[1].result(60), futures[2].result(60))
    with pytest.raises(CancelledError):
        futures[0].result()
    driver.call(lambda engine: engine.check_idle()).result(60)
    model.close()
    with pytest.raises(ValueError, match="this model is closed"):
        embedder.submit(random_texts(), LAST)


def test_an_error_fails_its_own_texts(saved, monkeypatch):
    with LLMModel(saved[0], dtype="float32", progress=False, kv_cache_bytes="64MiB") as model:
        embedder, runner = model.embedding_model.embedder, model.generator.engine.model
        rows = runner.final_rows
        monkeypatch.setattr(runner, "final_rows", lambda batch: rows(batch) * float("nan"))
        with pytest.raises(ValueError, match="rows are not finite"):
            embedder.rows(random_texts(), LAST)
        monkeypatch.setattr(runner, "final_rows", rows)
        assert embedder.rows(random_texts(), LAST).isfinite().all()
        monkeypatch.setattr(runner, "final_rows", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            embedder.rows(random_texts(), LAST)
        monkeypatch.setattr(runner, "final_rows", rows)
        assert embedder.rows(random_texts(), LAST).isfinite().all()
        model.generator.driver.call(lambda engine: engine.check_idle()).result(60)


FAMILIES = ["llama", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "bloom", "cohere", "granite"]


@pytest.mark.parametrize("model_type", sample(FAMILIES, always=lambda name: name == "gemma2"))
def test_rows_of_other_families(checkpoint, model_type):
    folder, oracle, _ = checkpoint(model_type)
    texts = random_texts((3, 40))
    with LLMModel(folder, dtype="float32", progress=False, kv_cache_bytes="64MiB") as model:
        found = model.embedding_model.embedder.rows(texts, LAST)
        for text, row in zip(texts, found, strict=True):
            expected = oracle_rows(oracle, text)[-1]
            assert (row - expected).abs().max() <= 2e-5 * expected.abs().max()
