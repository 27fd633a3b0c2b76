"""`pace quantize` of encoders: the result has the vectors of the same format at load."""

from __future__ import annotations

import json

import pytest
import torch

from pace.calibrate import quantize_checkpoint
from pace.cli import main
from pace.llm import EmbeddingModel
from pace.quant import QuantizationConfig
from tests.llm.encoding.checkpoints import save_bert, write_dense, write_modules

pytest.importorskip("transformers")
TEXTS = ["hello", "a longer text, of 36 letters or so"]


@pytest.fixture
def checkpoint(tmp_path):
    save_bert(tmp_path / "bert", hidden_size=32)
    pooling = ("Pooling", {"word_embedding_dimension": 32, "pooling_mode_cls_token": True})
    dense = {"in_features": 32, "out_features": 5, "bias": False, "activation_function": "torch.nn.Identity"}
    write_modules(tmp_path / "bert", pooling, ("Dense", dense))
    write_dense(tmp_path / "bert" / "2_Dense", {"linear.weight": torch.randn(5, 32)})
    return tmp_path / "bert"


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_vectors_are_those_of_the_format_at_load(format, checkpoint, tmp_path):
    out = tmp_path / "out"
    report = quantize_checkpoint(checkpoint, out, format, progress=False)
    assert report.head is None and report.method == "rtn" and report.num_tokens == 0
    assert "no text was given" in str(report)
    with EmbeddingModel(out) as ours, EmbeddingModel(checkpoint, quantization=format) as at_load:
        assert ours.dimensions == 5
        assert torch.equal(ours.embed(TEXTS), at_load.embed(TEXTS))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_a_classifier_keeps_its_head(tmp_path):
    save_bert(tmp_path / "ranker", "BertForSequenceClassification", num_labels=1)
    assert main(["quantize", str(tmp_path / "ranker"), str(tmp_path / "out"), "--format", "int8"]) == 0
    with EmbeddingModel(tmp_path / "out") as ours, EmbeddingModel(tmp_path / "ranker", quantization="int8") as at_load:
        assert torch.equal(ours.score([("a", "b")]), at_load.score([("a", "b")]))


def test_an_encoder_is_not_calibrated(checkpoint, tmp_path):
    for more in ({"method": "gptq", "calibrate": ["text"]}, {"calibrate": ["text"]}):
        with pytest.raises(NotImplementedError, match="not calibrated on a text"):
            quantize_checkpoint(checkpoint, tmp_path / "out", **more)
    with pytest.raises(ValueError, match="lm_head would have no effect on an encoder"):
        quantize_checkpoint(checkpoint, tmp_path / "out", QuantizationConfig("int8", lm_head="int8"))
    assert not (tmp_path / "out").exists()
