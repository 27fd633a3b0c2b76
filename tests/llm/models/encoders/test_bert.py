"""Traps of BERT and its relatives: positions from ids, types, old names, and what is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pace.llm.encoding.embedder import TextTokens
from pace.llm.models.encoders.encoder_list import find_encoder, read_encoder_config
from pace.ops import native
from tests.llm.models.encoders.oracle import load_encoder, oracle_rows, rows_of, unit
from tests.llm.models.encoders.variants import VARIANTS, save_encoder
from tests.support import TensorDict

pytest.importorskip("transformers")


def test_positions_of_roberta_skip_padding(tmp_path):
    oracle = save_encoder(tmp_path, VARIANTS["roberta"])
    encoder = load_encoder(tmp_path, native)
    assert encoder.positions_of(np.array([7, 1, 1, 8, 1, 9])).tolist() == [2, 1, 1, 3, 1, 4]
    assert encoder.max_length == 78
    text = TextTokens((7, 1, 1, 8, 1, 9))
    assert (unit(rows_of(encoder, text)) - unit(oracle_rows(oracle, encoder, text))).abs().max() <= 2e-6


def test_a_text_without_types_has_those_of_row_0(tmp_path):
    save_encoder(tmp_path, VARIANTS["bert"])
    encoder = load_encoder(tmp_path, native)
    plain, zeros = rows_of(encoder, TextTokens((5, 6, 7))), rows_of(encoder, TextTokens((5, 6, 7), (0, 0, 0)))
    assert torch.equal(plain, zeros)
    assert not torch.equal(plain, rows_of(encoder, TextTokens((5, 6, 7), (0, 0, 1))))


def renamed(folder, rename) -> dict[str, torch.Tensor]:
    return {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}


def test_old_names_and_left_out_tensors(tmp_path):
    """Checkpoints of all years load: names of norms before 2020, buffers, heads for masked words, with a prefix or
    without."""
    save_encoder(tmp_path, VARIANTS["bert"])
    encoder = load_encoder(tmp_path, native)
    expected = rows_of(encoder, TextTokens((5, 6, 7)))
    spellings = [
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        lambda name: f"bert.{name}",
    ]
    more = {
        "embeddings.position_ids": torch.arange(80)[None],
        "cls.predictions.bias": torch.zeros(97),
        "cls.seq_relationship.weight": torch.zeros(2, 32),
    }
    for spelling in spellings:
        tensors = renamed(tmp_path, spelling) | {
            name if name.startswith("cls.") else spelling(name): tensor for name, tensor in more.items()
        }
        other = type(encoder)(encoder.config, torch.float32, native)
        other.load_weights(TensorDict(tensors))
        assert torch.equal(rows_of(other, TextTokens((5, 6, 7))), expected)
    with pytest.raises(ValueError, match=r"unexpected \(1\): encoder\.layer\.9"):
        tensors = load_file(tmp_path / "model.safetensors") | {"encoder.layer.9.x": torch.zeros(3)}
        type(encoder)(encoder.config, torch.float32, native).load_weights(TensorDict(tensors))


def test_a_bare_encoder_has_no_classifier_and_a_classifier_needs_its_tensors(tmp_path):
    save_encoder(tmp_path, VARIANTS["bert-classifier"])
    raw = json.loads((tmp_path / "config.json").read_text())
    encoder_class, config = read_encoder_config(raw)
    assert config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    bare = read_encoder_config(raw | {"architectures": ["BertModel"]})[1]
    assert bare.labels == () and encoder_class(bare, torch.float32, native).head is None
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["classifier.bias"]
    with pytest.raises(ValueError, match=r"missing \(1\): classifier\.bias"):
        encoder_class(config, torch.float32, native).load_weights(TensorDict(tensors))


REFUSED = [
    ({"position_embedding_type": "relative_key"}, NotImplementedError, "position_embedding_type = 'relative_key'"),
    ({"is_decoder": True}, NotImplementedError, "is_decoder = True"),
    ({"hidden_act": "mish"}, NotImplementedError, "hidden_act"),
    ({"num_attention_heads": 5}, ValueError, "num_attention_heads"),
    ({"architectures": ["BertForTokenClassification"]}, NotImplementedError, "BertForTokenClassification"),
    ({"architectures": ["RobertaModel"], "pad_token_id": None}, ValueError, "pad_token_id"),
    ({"architectures": ["BertForSequenceClassification"], "id2label": {"1": "a"}}, ValueError, "id2label"),
    ({"architectures": ["BertForSequenceClassification"], "num_labels": 0}, ValueError, "num_labels"),
]


@pytest.mark.parametrize(("fields", "kind", "message"), REFUSED)
def test_what_is_refused(fields, kind, message):
    with pytest.raises(kind, match=message):
        read_encoder_config({"architectures": ["BertModel"], **fields})


def test_an_encoder_is_found_by_architecture_or_model_type():
    for raw in ({"architectures": ["XLMRobertaForSequenceClassification"]}, {"model_type": "xlm-roberta"}):
        assert find_encoder(raw).__name__ == "XLMRobertaModel"
    for raw in ({"architectures": ["LlamaForCausalLM"]}, {"model_type": "gpt2"}, {}, {"architectures": 3}, []):
        assert find_encoder(raw) is None


def test_quantisation_keeps_embeddings_and_heads(tmp_path):
    from pace.quant import QuantizationConfig

    save_encoder(tmp_path, VARIANTS["bert-classifier"])
    encoder_class, config = read_encoder_config(json.loads((tmp_path / "config.json").read_text()))
    for asked, embedding in ((QuantizationConfig("int8"), False), (QuantizationConfig("int8", embedding="int8"), True)):
        encoder = encoder_class(config, torch.float32, native)
        encoder.quantize(asked)
        encoder.load_weights(TensorDict(load_file(tmp_path / "model.safetensors")))
        coded = {name for matrix in encoder.matrices() for name in matrix.plan.layouts}
        assert ("bert.embeddings.word_embeddings" in coded) == embedding
        assert "bert.encoder.layer.1.output.dense" in coded
        assert not any("position" in name or "types" in name or "pooler" in name or "class" in name for name in coded)
