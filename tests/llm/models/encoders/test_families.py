"""Compares MPNet, ModernBERT, nomic-bert, gte, jina v3, EmbeddingGemma, EuroBERT and UltraBERT with transformers, text
by text, and with themselves in other steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.llm.encoding.embedder import TextTokens
from pace.llm.runners.encoder import EncoderRunner
from pace.ops import reference
from tests.llm.models.encoders.steps import load, logits, make_step, rows
from tests.llm.models.encoders.variants import IDS, VARIANTS, save_tiny

pytest.importorskip("transformers")

LENGTHS = (37, 1, 16, 9, 64)
"""More than the windows of the variants, and one token."""

def some_texts(lengths: Sequence[int] = LENGTHS, num_types: int = 1) -> list[TextTokens]:
    """Random texts. The second half of each is of the last type."""
    generator = torch.Generator().manual_seed(5)
    texts = [tuple(torch.randint(2, 160, (length,), generator=generator).tolist()) for length in lengths]
    if num_types < 2:
        return [TextTokens(text) for text in texts]
    return [TextTokens(t, (0,) * (len(t) // 2) + (num_types - 1,) * (len(t) - len(t) // 2)) for t in texts]


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def assert_rows_agree(found: Tensor, expected: Tensor, note: object) -> None:
    """fp32: the rows as unit vectors differ by 2e-6 at most."""
    excess = (unit(found) - unit(expected)).abs().max().item()
    assert excess <= 2e-6, f"{note}: {excess:.2e}"


def oracle_rows(oracle: torch.nn.Module, text: TextTokens) -> Tensor:
    given = {} if text.types is None else {"token_type_ids": torch.tensor([text.types])}
    with torch.inference_mode():
        return oracle(input_ids=torch.tensor([text.tokens]), **given).last_hidden_state[0]


@pytest.mark.parametrize("name", IDS)
def test_variant(name, tmp_path, restore_isa_and_threads):
    family, _, fields = VARIANTS[IDS.index(name)]
    oracle = save_tiny(tmp_path, family, fields)
    model = load(tmp_path)
    texts = some_texts(num_types=model.num_types)
    if family == "MPNet":
        texts += [TextTokens((5, 1, 7, 1, 9)), *some_texts((300,))]  # padding in a text; more than the largest distance
    found = rows(model, texts)
    for index, text in enumerate(texts):
        assert_rows_agree(found[index], oracle_rows(oracle, text), (name, len(text)))
        assert torch.equal(rows(model, [text])[0], found[index]), (name, len(text))
    assert_rows_agree(torch.cat(rows(load(tmp_path, ops=reference), texts)), torch.cat(found), "reference")
    order, runner = [3, 0, 4], EncoderRunner(model)
    for threads in (1, 3):
        _C.set_num_threads(threads)
        again = rows(model, [texts[i] for i in order])
        assert all(torch.equal(again[place], found[i]) for place, i in enumerate(order)), (name, threads)
        step = make_step(model, [texts[i] for i in order])
        recorded = runner.pooled(step, ("cls", "lasttoken"))
        expected = [torch.cat([found[i][0], found[i][-1]]) for i in order]
        assert torch.equal(recorded, torch.stack(expected)), (name, threads)


CLASSIFIERS = [
    ("MPNet", {}),
    ("ModernBert", {"classifier_activation": "relu", "norm_bias": True}),
    ("ModernBert", {"classifier_pooling": "mean", "classifier_bias": True}),
    ("NomicBert", {}),
    ("Gte", {}),
    ("JinaEmbeddingsV3", {}),
    ("EuroBert", {}),
    ("EuroBert", {"classifier_pooling": "bos"}),
    ("EuroBert", {"classifier_pooling": "mean"}),
    ("Ultrabert", {"classifier_pooling": "mean"}),
    ("Ultrabert", {}),
]


@pytest.mark.parametrize(("family", "fields"), CLASSIFIERS, ids=lambda value: str(value))
def test_classifier(family, fields, tmp_path):
    oracle = save_tiny(tmp_path, family, fields | {"num_labels": 3}, "ForSequenceClassification")
    model, texts = load(tmp_path), some_texts()
    found = logits(model, texts)
    assert model.num_labels == 3 and found.shape == (len(texts), 3)
    for index, text in enumerate(texts):
        with torch.inference_mode():
            expected = oracle(input_ids=torch.tensor([text.tokens])).logits[0]
        # The rows differ by 2e-6 of their length, and so does a product with them.
        torch.testing.assert_close(found[index], expected, rtol=2e-5, atol=2e-5, msg=lambda m: f"{len(text)}: {m}")
        assert torch.equal(logits(model, [text])[0], found[index])
