"""Adapters of encoders are merged at load. The vectors are those of peft."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from pace.cli import main
from pace.llm import EmbeddingModel
from pace.llm.adapters.merge import MergedReader
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.encoders.encoder_list import read_encoder_config
from pace.ops import native
from tests.llm.encoding.checkpoints import save_bert, save_causal
from tests.llm.models.encoders.oracle import oracle_rows, random_texts, rows_of
from tests.llm.models.encoders.variants import VARIANTS, save_encoder
from tests.plugins.tiers import sample
from tests.support import TensorDict

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from tests.llm.adapters.random_adapters import random_adapter, targets_of  # noqa: E402

OTHER_NAMES = ("gte", "jina", "nomic")
"""Families whose files have names of their own, with queries, keys and values as one matrix."""
FAMILIES = [
    name
    for name in VARIANTS
    if ("-" not in name or "classifier" in name) and name.removesuffix("-classifier") not in OTHER_NAMES
]
BOUND = 1e-4
"""Largest error, relative to the largest number of a text: that of `test_oracle.py`, 4e-5, and a product more."""


def tables_of(model: torch.nn.Module) -> list[str]:
    """Names of the embeddings of tokens."""
    found = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)]
    return [name for name in found if name.endswith(("word_embeddings", "embed_tokens", "tok_embeddings"))]


def merged(folder, weights: AdapterWeights) -> Encoder:
    encoder_class, config = read_encoder_config(json.loads((folder / "config.json").read_text()))
    encoder = encoder_class(config, torch.float32, native)
    state = TensorDict(load_file(folder / "model.safetensors"))
    encoder.load_weights(MergedReader(state, encoder, weights))
    return encoder


@pytest.mark.parametrize("name", sample(FAMILIES, lambda name: name == "bert"))
def test_rows_are_those_of_peft(name, tmp_path) -> None:
    base = save_encoder(tmp_path, VARIANTS[name])
    adapted, weights = random_adapter(base, 1, [*targets_of(base), *tables_of(base)])
    encoder = merged(tmp_path, weights)
    for text in random_texts(encoder)[3:6]:
        ours, theirs = rows_of(encoder, text), oracle_rows(adapted.base_model.model, encoder, text)
        assert (ours - theirs).abs().max() <= BOUND * theirs.abs().max()
        plain = oracle_rows(base, encoder, text)
        assert (plain - theirs).abs().max() > 100 * BOUND * theirs.abs().max()


@pytest.mark.parametrize("name", sample(OTHER_NAMES, lambda name: False))
def test_names_that_the_files_do_not_have(name, tmp_path) -> None:
    """transformers names the matrices of these families otherwise than their files do."""
    _, weights = random_adapter(save_encoder(tmp_path, VARIANTS[name]), 1)
    with pytest.raises(ValueError, match="(?s)cannot be merged.*self_attn.q_proj: the checkpoint has no such matrix"):
        merged(tmp_path, weights)


@pytest.mark.parametrize("kind", sample(["BertModel", "Qwen3Model"], lambda kind: False))
def test_an_adapter_as_it_is_published(kind, tmp_path, capsys) -> None:
    """Saved for the bare model, as sentence-transformers saves it."""
    save = save_bert if kind == "BertModel" else save_causal
    base = save(tmp_path / "base", kind)
    adapted, _ = random_adapter(base, 1, task_type="FEATURE_EXTRACTION")
    adapted.save_pretrained(tmp_path / "adapter")
    texts = ["yes, 12 foxes.", "no"]
    options = {"dtype": "float32", "progress": False, "kv_cache_bytes": "16MiB"}
    with EmbeddingModel(tmp_path / "base", **options) as plain:
        before, tokenizer = plain.embed(texts), plain.tokenizer
    with EmbeddingModel(tmp_path / "base", adapter=tmp_path / "adapter", merge=True, **options) as model:
        vectors = model.embed(texts)
    with torch.no_grad():
        for text, vector, other in zip(texts, vectors, before):
            rows = adapted(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
            expected = rows.mean(0) if kind == "BertModel" else rows[-1]
            assert (vector - expected).abs().max() <= BOUND * expected.abs().max()
            assert (vector - other).abs().max() > 0.01 * expected.abs().max()
    asked = ["embed", str(tmp_path / "base"), texts[0], "--adapter", str(tmp_path / "adapter"), "--dtype", "float32"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["embedding"] == pytest.approx(vectors[0].tolist(), abs=1e-6)
    with pytest.raises(ValueError, match="adapter= needs merge=True"):
        EmbeddingModel(tmp_path / "base", adapter=tmp_path / "adapter", **options)
