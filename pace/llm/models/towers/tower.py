"""Base class of towers. A tower turns one medium, an image or a clip, into rows that take the place of embeddings."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch, GivenRows, LayerBlocks, LayerCache
from pace.llm.layers import Layer
from pace.llm.layers.rotary import Angles
from pace.llm.models.whole_spans import whole_spans
from pace.media.media import Media
from pace.ops.protocol import ForwardOps


class Slice(Layer):
    """A part of a tower that runs as one program: rows in, rows out."""

    caches: tuple[LayerCache, ...] = ()
    """What it keeps of each row, for each group of spans; its keys and values are not needed after it."""
    angle_halves: tuple[int, ...] = ()
    """Width of each table of angles that it uses."""
    width: int | None = None
    """Columns of its result; None for those of its last product, or of the given rows if it has no product."""

    @abstractmethod
    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        """Returns rows `[T, W]`, computed from the given rows of a batch, one for each of its T tokens. Recorded like
        the `compute` of a model."""


RunSlice = Callable[[Slice, ForwardBatch, Angles], Tensor]
"""Runs a slice of a loaded tower; see `ModelRunner.run_slice`."""


class Tower(Layer):
    """Encodes media of one kind. Its layers are part of the model, and loaded with it.

    The programs of its slices are recorded like the model's, and run between the steps of the model. Rows of different
    media are never in one batch, so the rows of a medium depend on no other."""

    kind: ClassVar[str]
    """Kind of `Media` that it encodes: "image" or "audio"."""
    prefix: ClassVar[str]
    """Prefix of the names of its tensors."""
    input_names: ClassVar[tuple[str, ...]]
    """Names of the arrays that a processor of transformers makes for it."""
    placeholder: int
    """Id of the token that stands for each of its rows in a prompt."""
    width: int
    """Floats of a row."""
    rows_a_second: int = 0
    """Rows of a second of sound; 0 for images."""
    clip_seconds: int = 60
    """Length of the clip whose encoding is planned and measured. The longest clip, if that is shorter."""
    unused: tuple[str, ...] = ()
    """Regular expressions of tensors in checkpoints that it does not need."""

    @abstractmethod
    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        """Yields after each slice but the last. Returns float32 `[media.num_tokens, width]`. `run` computes a slice."""

    @abstractmethod
    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        """Makes media of the arrays in `input_names`, as a processor of transformers makes them. Raises ValueError or
        TypeError for arrays that do not fit the tower."""

    def arrays_of(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        """The arrays in `input_names`. Raises ValueError if one is missing."""
        return read_arrays(inputs, self.kind, self.input_names)

    def blank(self, num_tokens: int) -> Media:
        """A medium of zeros, to predict or measure its encoding. It is the largest of at most this number of tokens, or
        the smallest if all have more. An image is nearly a square. Raises NotImplementedError for a tower without
        it."""
        raise NotImplementedError(f"{type(self).__name__} makes no blank media")

    def angle_offsets(self, media: Media) -> tuple[np.ndarray, int]:
        """Positions `[3, num_tokens]` of a medium's rows in time, height and width, counted from its first one, and the
        number of positions that it takes (M-RoPE). The default is the positions of text."""
        return np.tile(np.arange(media.num_tokens), (3, 1)), media.num_tokens


def read_arrays(inputs: Mapping[str, Any], kind: str, names: Sequence[str]) -> list[Tensor]:
    """The arrays of these names, which a tower for media of this kind needs. Raises ValueError if one is missing."""
    if missing := [name for name in names if inputs.get(name) is None]:
        given = "images are" if kind == "image" else "sound is"
        raise ValueError(f"{given} given as {' and '.join(names)}; {missing[0]} is missing")
    return [torch.as_tensor(inputs[name]) for name in names]


def near_square(count: int) -> tuple[int, int]:
    """Rows and columns of the grid of `count` places that is nearest to a square."""
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return rows, count // rows


def rows_batch(rows: Tensor, kv: Sequence[LayerBlocks] = (), *lengths: Sequence[int]) -> ForwardBatch:
    """A batch of rows `[T, W]`, in spans of these lengths whose rows see each other: one list for each group of `kv`.
    Without lengths, no row needs another."""
    at = torch.arange(len(rows))
    groups = [whole_spans(each) for each in lengths or ([len(rows)],)]
    given = GivenRows(rows, at)
    batch = ForwardBatch(at, at, at, groups[0][0], groups[0][1], at[:0], list(kv), given)
    return replace(batch, others=tuple(replace(batch, spans=spans, slots=slots) for spans, slots in groups[1:]))


def with_rows(batch: ForwardBatch, rows: Tensor) -> ForwardBatch:
    """The batch with other rows in the same spans."""
    given = GivenRows(rows, batch.tokens)
    return replace(batch, given=given, others=tuple(replace(other, given=given) for other in batch.others))
