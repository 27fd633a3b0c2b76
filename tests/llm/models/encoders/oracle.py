"""Texts of random tokens, and their rows and logits as transformers computes them, each text alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.steps import MAX_TEXTS, MAX_TOKENS, TextSteps
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.encoders.encoder_list import read_encoder_config
from tests.support import TensorDict

LENGTHS = (1, 2, 15, 16, 17, 33, 48, 74)
"""Around the edges of blocks, and beyond the windows of all variants."""


def load_encoder(folder: Path, ops: ModuleType, dtype: torch.dtype = torch.float32) -> Encoder:
    """Loads the encoder of a folder with one safetensors file."""
    encoder_class, config = read_encoder_config(json.loads((folder / "config.json").read_text()))
    encoder = encoder_class(config, dtype, ops)
    encoder.load_weights(TensorDict(load_file(folder / "model.safetensors")))
    return encoder


def random_texts(encoder: Encoder, lengths: tuple[int, ...] = LENGTHS) -> list[TextTokens]:
    """Texts of any ids, those of padding included, in every other one with random types."""
    random = np.random.default_rng(len(lengths))
    texts = []
    for index, length in enumerate(lengths):
        tokens = random.integers(0, encoder.vocab_size, length)
        types = random.integers(0, max(1, encoder.num_types), length) if index % 2 else None
        texts.append(TextTokens(tuple(tokens.tolist()), None if types is None else tuple(types.tolist())))
    return texts


def rows_of(encoder: Encoder, text: TextTokens) -> Tensor:
    """The rows `[T, hidden]` of a text, op by op."""
    return encoder.forward(TextSteps(encoder, MAX_TOKENS, MAX_TEXTS).batch([text]))


@torch.no_grad()
def oracle_rows(model: Any, encoder: Encoder, text: TextTokens) -> Tensor:
    """The rows `[T, hidden]` of a text as transformers computes them."""
    return model.base_model(**arguments(encoder, text)).last_hidden_state[0]


@torch.no_grad()
def oracle_logits(model: Any, encoder: Encoder, text: TextTokens) -> Tensor:
    return model(**arguments(encoder, text)).logits[0]


def arguments(encoder: Encoder, text: TextTokens) -> dict[str, Tensor]:
    """A text as keyword arguments of transformers' models: no padding, so all tokens are seen."""
    ids = torch.tensor([text.tokens])
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if encoder.num_types and text.types is not None:
        found["token_type_ids"] = torch.tensor([text.types])
    return found


def unit(rows: Tensor) -> Tensor:
    """The mean of the rows of a text, of length 1."""
    mean = rows.mean(0)
    return mean / mean.norm()
