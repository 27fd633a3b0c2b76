"""Compares MPNet, ModernBERT, nomic-bert, gte, jina v3, EmbeddingGemma, EuroBERT and UltraBERT with transformers, text
by text, and with themselves in other steps."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.ops import reference
from tests.llm.models.encoders.steps import load, logits, make_step, rows
from tests.llm.models.encoders.variants import FAMILIES, IDS, VARIANTS, make_config, save_tiny

pytest.importorskip("transformers")

LENGTHS = (37, 1, 16, 9, 64)
"""More than the windows of the variants, and one token."""

WITH_TYPES = ("NomicBert", "Gte")


def some_texts(lengths=LENGTHS, vocab_size: int = 160) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def some_types(texts: list[list[int]], num_types: int) -> list[list[int]]:
    """The second half of each text is of another type."""
    return [[0] * (len(text) // 2) + [num_types - 1] * (len(text) - len(text) // 2) for text in texts]


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def assert_rows_agree(found: Tensor, expected: Tensor, note: object) -> None:
    """fp32: the rows as unit vectors differ by 2e-6 at most."""
    excess = (unit(found) - unit(expected)).abs().max().item()
    assert excess <= 2e-6, f"{note}: {excess:.2e}"


def oracle_rows(oracle: torch.nn.Module, text: list[int], types: list[int] | None = None) -> Tensor:
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        return oracle(input_ids=torch.tensor([text]), **given).last_hidden_state[0]


@pytest.mark.parametrize("name", IDS)
def test_variant(name, tmp_path, restore_isa_and_threads):
    family, _, fields = VARIANTS[IDS.index(name)]
    oracle = save_tiny(tmp_path, family, fields)
    model, texts = load(tmp_path), some_texts()
    if family == "MPNet":
        texts += [[5, 1, 7, 1, 9], some_texts((300,))[0]]  # padding inside of a text; farther than the largest distance
    types = some_types(texts, model.num_types) if model.num_types > 1 else None
    found = rows(model, texts, types)
    for index, text in enumerate(texts):
        expected = oracle_rows(oracle, text, types and types[index])
        assert_rows_agree(found[index], expected, (name, len(text)))
        alone = rows(model, [text], types and [types[index]])[0]
        assert torch.equal(alone, found[index]), (name, len(text))
    assert_rows_agree(torch.cat(rows(load(tmp_path, ops=reference), texts, types)), torch.cat(found), "reference")
    order = [3, 0, 4]
    for threads in (1, 3):
        _C.set_num_threads(threads)
        again = rows(model, [texts[i] for i in order], types and [types[i] for i in order])
        assert all(torch.equal(again[place], found[i]) for place, i in enumerate(order)), (name, threads)


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
            expected = oracle(input_ids=torch.tensor([text])).logits[0]
        # The rows differ by 2e-6 of their length, and so does a product with them.
        torch.testing.assert_close(found[index], expected, rtol=2e-5, atol=2e-5, msg=lambda m: f"{len(text)}: {m}")
        assert torch.equal(logits(model, [text])[0], found[index])
