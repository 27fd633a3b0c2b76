"""Runs an encoder without its driver: whole texts in one step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.checkpoints.reader import CheckpointReader
from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.steps import TextSteps
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.encoders.encoder_list import read_encoder_config
from pace.llm.runners.encoder import EncoderRunner
from pace.ops import native


def load(folder: Path, dtype: torch.dtype = torch.float32, ops=native) -> Encoder:
    """Loads the encoder of a folder."""
    model_class, config = read_encoder_config(json.loads((folder / "config.json").read_text()))
    model = model_class(config, dtype, ops)
    with CheckpointReader(folder) as reader:
        model.load_weights(reader)
    return model


def make_step(model: Encoder, texts: Sequence[TextTokens]) -> ForwardBatch:
    return TextSteps(model, sum(map(len, texts)), len(texts)).batch(texts)


def rows(model: Encoder, texts: Sequence[TextTokens]) -> list[Tensor]:
    """Returns the rows of each text, op by op."""
    return list(model.forward(make_step(model, texts)).split([len(text) for text in texts]))


def logits(model: Encoder, texts: Sequence[TextTokens]) -> Tensor:
    """Returns the logits of the classifier, by a program."""
    return EncoderRunner(model).logits(make_step(model, texts))
