"""Runs an encoder without the driver: whole texts in one step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.checkpoints.reader import open_checkpoint
from pace.llm.models.encoders.encoder import Encoder, PooledRows
from pace.llm.models.encoders.encoder_list import read_encoder_config
from pace.llm.models.towers.tower import scratch, whole_spans
from pace.ops import native


def load(folder: Path, dtype: torch.dtype = torch.float32, ops=native) -> Encoder:
    """Loads the encoder of a folder."""
    model_class, config = read_encoder_config(json.loads((folder / "config.json").read_text()))
    model = model_class(config, dtype, ops)
    with open_checkpoint(folder) as reader:
        model.load_weights(reader)
    return model


def make_step(model: Encoder, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None):
    """Returns the step of these texts."""
    lengths = [len(text) for text in texts]
    spans, slots = whole_spans(lengths)
    tokens = torch.tensor([token for text in texts for token in text])
    positions = torch.from_numpy(np.concatenate([model.positions_of(np.array(text)) for text in texts]))
    own = torch.cat([torch.arange(length) for length in lengths])
    first = scratch(model.caches[0], lengths)[0]
    kv = [replace(first, group=group) for group in range(len(model.caches))]
    flat = [kind for text in types for kind in text] if types else [0] * len(tokens)
    batch = ForwardBatch(
        tokens,
        positions,
        torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)),
        spans,
        slots,
        torch.arange(0),
        kv,
        types=torch.tensor(flat) if model.num_types else None,
    )
    seen = [batch]
    for cache in model.caches:
        newest = spans.newest
        if cache.window is not None:
            newest = torch.minimum(newest, (own + cache.window - 1).int())
        seen.append(replace(batch, spans=replace(spans, newest=newest)))
    return replace(seen[1], others=tuple(seen[2:]))


def rows(model: Encoder, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """Returns the rows of each text, op by op."""
    found = model.forward(make_step(model, texts, types))
    return list(found.split([len(text) for text in texts]))


def logits(model: Encoder, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Returns the logits of the classifier."""
    batch = make_step(model, texts, types)
    return PooledRows(model, model.head.pooling, model.head).compute(model.ops, batch, model.angles(batch))
