"""Spans whose rows see each other, and the memory that their keys and values need during a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec, LayerBlocks, Positions, Spans


def whole_spans(lengths: Sequence[int], window: int | None = None) -> tuple[Spans, Tensor]:
    """Spans of these lengths whose rows see each other, and their slots. Each span has blocks of its own. With
    `window = w + 1`, as in `Positions`, a row sees the w rows after it."""
    sizes = np.array(lengths, dtype=np.int64)
    blocks = -(-sizes // BLOCK_SIZE)
    first_blocks = np.cumsum(blocks) - blocks
    positions = np.concatenate([np.arange(size) for size in sizes])
    newest = (sizes - 1).repeat(sizes)
    if window is not None:
        newest = np.minimum(newest, positions + window - 1)
    tables = first_blocks[:, None] + np.arange(blocks.max())
    starts = np.concatenate([[0], np.cumsum(sizes)])
    spans = Spans(
        torch.from_numpy(starts.astype(np.int32)),
        torch.from_numpy(sizes.astype(np.int32)),
        torch.from_numpy(tables.astype(np.int32)),
        torch.from_numpy(newest.astype(np.int32)),
    )
    return spans, torch.from_numpy(first_blocks.repeat(sizes) * BLOCK_SIZE + positions)


def scratch_blocks(layer: Positions, num_blocks: int, num_groups: int) -> list[LayerBlocks]:
    """Keys and values of one layer, float32, which all layers use in turn. Each group of spans has the same memory."""
    blocks = KVSpec((layer,), torch.float32).allocate(num_blocks)[0]
    assert isinstance(blocks, KVBlocks)
    return [replace(blocks, group=group) for group in range(num_groups)]


def scratch(layer: Positions, *groups: Sequence[int]) -> list[LayerBlocks]:
    """`scratch_blocks` for groups of spans, given by their lengths."""
    num_blocks = max(sum(-(-length // BLOCK_SIZE) for length in lengths) for lengths in groups)
    return scratch_blocks(layer, num_blocks, len(groups))
