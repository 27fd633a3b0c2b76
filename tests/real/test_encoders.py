"""The real all-MiniLM-L6-v2: transformers' vectors, alone and in any batch."""

from __future__ import annotations

import pytest
import torch

from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.load import open_encoder
from pace.llm.loading.options import LoadOptions
from tests.real.packages import MINILM, Unavailable, fetch_folder
from tests.real.texts import ODD_TEXTS

pytest.importorskip("transformers")

HELLO = (-0.034477, 0.031023, 0.006735, 0.026109)
"""First elements of the vector of "hello world", as sentence-transformers computes it."""
SENTENCES = ["hello world", "The cat sat on the mat.", "A longer sentence, with some more words in it. " * 20]


@pytest.fixture(scope="module")
def folder():
    try:
        return fetch_folder(MINILM)
    except Unavailable as error:
        pytest.skip(str(error))


def vectors(driver, texts):
    return torch.nn.functional.normalize(driver.rows(texts, ("mean",)))


def test_vectors_of_transformers(folder, subtests):
    from transformers import AutoModel, AutoTokenizer

    oracle = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text for text in [*SENTENCES, *ODD_TEXTS] if text]
    ids = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in texts]
    tokens = [TextTokens(tuple(each)) for each in ids]
    loaded = open_encoder(LoadOptions(folder, dtype="float32", progress=False))
    with torch.no_grad():
        rows = [oracle(input_ids=torch.tensor([each])).last_hidden_state[0].mean(0) for each in ids]
    expected = torch.nn.functional.normalize(torch.stack(rows))
    alone = torch.cat([vectors(loaded.driver, [text]) for text in tokens])
    assert (alone - expected).abs().max() <= 2e-6
    assert (alone[0, :4] - torch.tensor(HELLO)).abs().max() < 1e-6
    for batch in (tokens, tokens[::-1]):
        found = vectors(loaded.driver, batch * 3)
        assert torch.equal(found, (alone if batch is tokens else alone.flip(0)).repeat(3, 1))
    loaded.driver.close()
    for options, least in (({"dtype": "bfloat16"}, 0.9999), ({"dtype": "float32", "quantization": "int8"}, 0.995)):
        other = open_encoder(LoadOptions(folder, progress=False, **options)).driver
        cosines = (vectors(other, tokens) * expected).sum(1)
        assert cosines.mean() > least, (options, cosines)
        other.close()
