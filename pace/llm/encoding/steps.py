"""Whole texts as one step of an encoder: `TextSteps`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, ForwardBatch, Spans
from pace.llm.encoding.embedder import TextTokens
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.whole_spans import scratch_blocks, whole_spans

MAX_TOKENS = 1024
"""Tokens of a step, unless a text has more. Weights are then read once for many rows, and a step is short."""
MAX_TEXTS = 256
"""Texts of a step. Each has blocks of 16 positions of its own, however short it is."""
MAX_LENGTH = 8192
"""Default limit of a text's tokens, which are all in one step."""


QUERY_TOKENS = 64
"""Tokens of a text that counts as a query. A step of one query takes its spans from an earlier one of its length."""


class Shape(NamedTuple):
    """What a step of texts has by their lengths alone. Steps share it."""

    groups: list[tuple[Spans, Tensor]]
    """Spans and slots for each form of attention."""
    rope_lengths: Tensor
    logit_rows: Tensor


def shape_of(lengths: tuple[int, ...], windows: tuple[int | None, ...]) -> Shape:
    """The shape of a step of texts of these lengths. `windows`: those of the forms of attention."""
    groups = [whole_spans(lengths, window) for window in windows]
    logit_rows = groups[0][0].query_start[1:].long() - 1
    return Shape(groups, torch.from_numpy(np.repeat(lengths, lengths)), logit_rows)


shape_of_query = lru_cache(maxsize=2 * QUERY_TOKENS)(shape_of)


class TextSteps:
    """Makes the `ForwardBatch` of texts, laid end to end without padding. All steps use the same memory for keys and
    values, which becomes resident as far as a step uses it."""

    def __init__(self, encoder: Encoder, max_tokens: int, max_texts: int, tasks: Mapping[str, int] = {}):
        """`max_tokens`, `max_texts`: those of the largest step. `tasks`: the slot of the adapter of each task."""
        self._encoder = encoder
        self._tasks = tasks
        caches = encoder.caches
        num_blocks = -(-max_tokens // BLOCK_SIZE) + max_texts
        self._windows = tuple([cache.window for cache in caches])
        self._kv = scratch_blocks(caches[0], num_blocks, len(caches))

    def batch(self, texts: Sequence[TextTokens]) -> ForwardBatch:
        """Returns the step of these texts, with one row of logits for each."""
        encoder, lengths = self._encoder, tuple([len(text.tokens) for text in texts])
        arrays = [np.array(text.tokens, dtype=np.int64) for text in texts]
        is_query = len(texts) == 1 and lengths[0] <= QUERY_TOKENS
        shape = (shape_of_query if is_query else shape_of)(lengths, self._windows)
        spans, slots = shape.groups[0]
        batch = ForwardBatch(
            tokens=torch.from_numpy(np.concatenate(arrays)),
            positions=torch.from_numpy(np.concatenate([encoder.positions_of(array) for array in arrays])),
            rope_lengths=shape.rope_lengths,
            spans=spans,
            slots=slots,
            logit_rows=shape.logit_rows,
            kv=self._kv,
            types=torch.from_numpy(np.concatenate([_types(text) for text in texts])) if encoder.num_types else None,
            routing=self._routing(texts),
        )
        others = tuple([replace(batch, spans=spans, slots=slots) for spans, slots in shape.groups[1:]])
        return replace(batch, others=others) if others else batch

    def _routing(self, texts: Sequence[TextTokens]) -> torch.Tensor | None:
        """The adapter of each token; None if no text has a task."""
        if not any(text.task for text in texts):
            return None
        slots = [self._tasks[text.task] if text.task else -1 for text in texts]
        of_tokens = np.repeat(np.array(slots, dtype=np.float32), [len(text.tokens) for text in texts])
        return torch.from_numpy(np.stack([of_tokens, np.ones_like(of_tokens)], axis=1))


def _types(text: TextTokens) -> np.ndarray:
    """The types of a text's tokens, int64."""
    return np.zeros(len(text.tokens), dtype=np.int64) if text.types is None else np.array(text.types, dtype=np.int64)
