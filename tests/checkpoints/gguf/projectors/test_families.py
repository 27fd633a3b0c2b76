"""mmproj files of families other than Qwen's: a pair with the GGUF file of a model gives the rows and texts of the
checkpoint that both come from."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.llm.processors.prompts import MediaPart
from tests.checkpoints.gguf.projectors.files import FAMILIES, save_pair
from tests.checkpoints.gguf.projectors.test_qwen import load
from tests.llm.models.towers.seeing import results, run_to_end
from tests.llm.processors.chatting import picture
from tests.plugins.tiers import sample

ALL = sorted(FAMILIES)


IMAGE = picture(40, 24)


def rows_of(model, media) -> torch.Tensor:
    return run_to_end(model._engine.model.encode(media))


def tokens_of(model, text: str) -> list[int]:
    """Ids of a prompt with one image."""
    return model._generator.encoder.encode(text, [MediaPart("image", IMAGE)], model.tokenizer).tokens


@pytest.mark.parametrize("family", sample(ALL, always=lambda family: family in ("gemma4_unified", "mistral3")))
def test_rows_and_texts_are_those_of_the_checkpoint(family, tmp_path, caplog):
    hub, path, mmproj = save_pair(tmp_path, family)
    with load(hub) as expected, caplog.at_level(logging.WARNING, "pace"), load(path, mmproj=mmproj) as model:
        assert type(model._model) is type(expected._model)
        processor = model._generator.encoder.all.image
        media = processor.prepare(IMAGE)
        rows = rows_of(model, media)
        assert len(rows) == media.num_tokens and torch.equal(rows, rows_of(expected, media))
        text = f"ab{processor.placeholder}xyz"
        found = model.generate({"prompt": text, "images": [IMAGE]}, max_new_tokens=12, logprobs=0)
        inputs = {"input_ids": torch.tensor([tokens_of(model, text)]), **model.processor(images=[IMAGE])}
        same = expected.generate(inputs, max_new_tokens=12, logprobs=0)
        assert results(found) == results(same)
    assert "ignored" not in caplog.text and "mmproj" not in caplog.text
