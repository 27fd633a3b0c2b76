"""Rows of images and clips: `MediaEncoder` computes them between steps and keeps them for later prompts."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

from torch import Tensor

from pace.llm.sequence import MediaSpan, Sequence
from pace.media.media import Media

MEDIA_CACHE_BYTES = 256 << 20
"""Default size of the cache of rows. An image of 300 tokens of Qwen3-VL-2B takes 10 MB."""
SLICE_SECONDS = 0.02
"""Slices run until this time has passed, and at least one. The sequences that generate wait for it."""

MAX_WHOLE_TOKENS = 1120
"""Maximum tokens of an image that a step must have as a whole, unless steps may have more tokens. Caches of layers with
a window have room for it. It is the largest image of Gemma 4."""

Key = tuple[str | None, bytes]
"""Cache salt and digest: rows are shared by the sequences that may share keys and values."""


class MediaEncoder:
    """Encodes the media of running sequences, first come, first served, a few slices of a tower after each step.

    Rows stay until the cache is full. Then the least recently used ones go, but none that the sequence in turn needs,
    or one before it. So rows take at most `cache_bytes` and those of one sequence.
    Rows that were dropped are encoded again when needed, with the same bits. Not thread-safe: the thread that
    owns the engine calls it."""

    def __init__(self, model: Any, cache_bytes: int = MEDIA_CACHE_BYTES) -> None:
        """`model` has an `encode`, as `ModelRunner`."""
        self._model = model
        self.cache_bytes = cache_bytes
        self._rows: dict[Key, Tensor] = {}
        """Least recently used first."""
        self._encoding: tuple[Key, Generator[None, None, Tensor]] | None = None
        self.num_encoded = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows in the cache."""
        return sum(rows.nbytes for rows in self._rows.values())

    def of(self, sequence: Sequence, media: Media) -> Tensor:
        """Rows float32 `[num_tokens, W]` of a medium among the `ready` tokens of a sequence."""
        key = key_of(sequence, media)
        rows = self._rows[key] = self._rows.pop(key)
        return rows

    def ready(self, sequence: Sequence) -> int:
        """Returns the number of first tokens that a step can compute: those before the first missing rows."""
        missing = self._first_missing(sequence)
        return len(sequence.tokens) if missing is None else missing.start

    def advance(self, sequences: Iterable[Sequence]) -> Sequence | None:
        """Runs slices for the first of these running sequences that lacks rows, and returns it. It has failed if its
        tower raised an error. Returns None if no rows are missing."""
        ahead: list[Sequence] = []
        for sequence in sequences:
            missing = self._first_missing(sequence)
            if missing is not None:
                try:
                    self._run(sequence, missing.media, ahead)
                except Exception as error:
                    self._encoding = None
                    sequence.fail(error)
                return sequence
            ahead.append(sequence)
        self._encoding = None
        return None

    def reset(self) -> None:
        """Drops everything."""
        self._rows.clear()
        self._encoding = None

    def _first_missing(self, sequence: Sequence) -> MediaSpan | None:
        """The first medium with tokens that are not computed, and rows that are not there."""
        for placed in sequence.media:
            if sequence.num_computed < placed.end and key_of(sequence, placed.media) not in self._rows:
                return placed
        return None

    def _run(self, sequence: Sequence, media: Media, ahead: list[Sequence]) -> None:
        key = key_of(sequence, media)
        if self._encoding is None or self._encoding[0] != key:
            self._encoding = key, self._model.encode(media)
        end = time.perf_counter() + SLICE_SECONDS
        try:
            while True:
                next(self._encoding[1])
                if time.perf_counter() >= end:
                    return
        except StopIteration as finished:
            self._encoding = None
            self._keep(key, finished.value, [*ahead, sequence])

    def _keep(self, key: Key, rows: Tensor, users: list[Sequence]) -> None:
        """Adds rows, and drops others that none of `users` needs."""
        needed = {
            key_of(sequence, placed.media)
            for sequence in users
            for placed in sequence.media
            if sequence.num_computed < placed.end
        }
        too_many = self.num_bytes + rows.nbytes - self.cache_bytes
        for other in [other for other in self._rows if other not in needed]:
            if too_many <= 0:
                break
            too_many -= self._rows.pop(other).nbytes
        self._rows[key] = rows
        self.num_encoded += 1


def whole_media_end(sequence: Sequence, start: int, end: int) -> int:
    """The end of a chunk that has no part of a medium: `end`, or before the medium that it would cut. A chunk that
    starts with that medium, or within it, ends after it."""
    cut = next((placed for placed in sequence.media if placed.start < end < placed.end), None)
    if cut is None:
        return end
    return cut.start if cut.start > start else cut.end


def is_between_media(sequence: Sequence, position: int) -> bool:
    """True if no medium has tokens both before a position and from there on."""
    return not any(placed.start < position < placed.end for placed in sequence.media)


def key_of(sequence: Sequence, media: Media) -> Key:
    return sequence.cache_salt, media.digest
