"""Rows of images and clips, encoded when the engine needs them: `MediaRows`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pace.llm.sequence import Sequence, Span
from pace.media.media import Media


class MediaRows:
    """Rows of the media whose tokens sequences in the engine have yet to compute. Not thread-safe: the thread that owns
    the engine calls it."""

    def __init__(self, model: Any) -> None:
        """`model` has an `encode`, as `ModelRunner`."""
        self._model = model
        self._rows: dict[bytes, Tensor] = {}

    def of(self, media: Media) -> Tensor:
        """Rows float32 `[num_tokens, W]` of a medium that was encoded."""
        return self._rows[media.digest]

    def encode_for(self, span: Span) -> None:
        """Encodes the media that a span overlaps, as far as their rows are not there: all of each at once."""
        for placed in span.sequence.media:
            if placed.start < span.end and span.start < placed.end and placed.media.digest not in self._rows:
                self._rows[placed.media.digest] = run_to_end(self._model.encode(placed.media))

    def keep_for(self, sequences: Iterable[Sequence]) -> None:
        """Drops the rows that none of these sequences needs."""
        if self._rows:
            needed = {
                placed.media.digest
                for sequence in sequences
                for placed in sequence.media
                if sequence.num_computed < placed.end
            }
            self._rows = {digest: rows for digest, rows in self._rows.items() if digest in needed}


def run_to_end(encoding: Any) -> Tensor:
    """Runs all slices of a tower, and returns the rows."""
    while True:
        try:
            next(encoding)
        except StopIteration as end:
            return end.value
