"""`pace quantize --adapter`: the result has the weights of the same adapter merged at load."""

from __future__ import annotations

import pytest
import torch

from pace.assets import TINY
from pace.calibrate import quantize_checkpoint
from pace.cli import main
from pace.llm import LLMModel

pytest.importorskip("peft")
from tests.llm.adapters.saved import save_adapter

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter")
    save_adapter(path, 1, target_modules=["q_proj", "down_proj"])
    return path


def logits(**options) -> torch.Tensor:
    with LLMModel(progress=False, **options) as model, model.session() as session:
        return session.append(model.tokenizer(PROMPT)["input_ids"]).clone()


def test_as_at_load(adapter, tmp_path):
    assert (
        main(
            [
                "quantize",
                str(TINY),
                str(tmp_path / "out"),
                "--format",
                "int8",
                "--method",
                "rtn",
                "--no-report",
                "--adapter",
                str(adapter),
            ]
        )
        == 0
    )
    at_load = logits(model_name_or_path=TINY, adapter=adapter, merge=True, quantization="int8")
    assert torch.equal(logits(model_name_or_path=tmp_path / "out"), at_load)
    assert not torch.equal(logits(model_name_or_path=TINY, quantization="int8"), at_load)


def test_floats_keep_their_dtype(adapter, tmp_path):
    from pace.checkpoints.reader import CheckpointReader
    from pace.quant import QuantizationConfig

    config = QuantizationConfig("int8", overrides={"*.q_proj": None})
    quantize_checkpoint(TINY, tmp_path / "out", config, method="rtn", report=False, progress=False, adapter=adapter)
    name = "model.layers.0.self_attn.q_proj.weight"
    with CheckpointReader(TINY) as base, CheckpointReader(tmp_path / "out") as out:
        assert out.tensors[name] == base.tensors[name]
        assert not torch.equal(out.read(name), base.read(name))
    merged = logits(model_name_or_path=TINY, adapter=adapter, merge=True, quantization=config)
    assert torch.equal(logits(model_name_or_path=tmp_path / "out"), merged)


def test_refusals(adapter, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        quantize_checkpoint(TINY, tmp_path / "out", "int8", method="rtn", progress=False, adapter=tmp_path / "none")
    assert not (tmp_path / "out").exists()
