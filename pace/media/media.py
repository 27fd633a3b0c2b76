"""Prepared images and clips, and the error for media that cannot be read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class MediaError(ValueError):
    """An image or clip that cannot be read or exceeds a limit. Its message is a sentence without any of the data."""


@dataclass(frozen=True)
class Layout:
    """What takes the place of a medium's marker in the text of a prompt."""

    text: str
    """With a placeholder token for each row of the tower. Tiles and rows of an image may have other text between."""
    runs: tuple[int, ...]
    """Numbers of placeholders that follow each other without other text, in order."""

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens: rows of the tower."""
        return sum(self.runs)


@dataclass(frozen=True, eq=False)
class Media:
    """One prepared image or clip."""

    kind: str
    """"image" or "audio"."""
    features: np.ndarray
    """float32. An image: patches `[N, K]` in the tower's order, or the pixels of tiles `[T, 3, H, W]`. Sound: a log-mel
    spectrogram `[mels, frames]`, or frames `[N, K]`."""
    grid: tuple[int, int, int] | None
    """Frames or tiles of an image, and rows and columns of the patches of each; None for sound."""
    num_tokens: int
    """Placeholder tokens in the prompt, and rows that the tower returns."""
    digest: bytes
    """SHA-256 of the decoded pixels or samples, their size and the processor's settings. Equal digests mean equal
    features."""
    runs: tuple[int, ...] = ()
    """Lengths of the runs of placeholders, as in `Layout`; left out for a single run."""
    thumbnail: tuple[int, int] | None = None
    """Rows and columns of the patches of the whole image, which follow those of the tiles of `grid`; None without
    them."""
    canvas: tuple[int, int, int, int] | None = None
    """Rows and columns of the tiles of an enlarged image, and its height and width before it was enlarged. These tiles
    follow that of the whole image. None without them."""

    def __post_init__(self) -> None:
        if not self.runs:
            object.__setattr__(self, "runs", (self.num_tokens,))


def digest_of(about: str, contents: bytes | np.ndarray) -> bytes:
    """SHA-256 of pixels, samples or features, and of what else decides about them."""
    digest = hashlib.sha256(about.encode())
    digest.update(contents)
    return digest.digest()


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """A run of placeholders in a prompt: the tokens `start .. end - 1` stand for rows of `media`, from `first` on. A
    medium has one span for each of its runs."""

    start: int
    media: Media
    first: int = 0
    """The medium's row that the first token stands for."""
    length: int = field(default=0, kw_only=True)
    """Number of tokens; left out for all rows from `first` on."""

    def __post_init__(self) -> None:
        if not self.length:
            object.__setattr__(self, "length", self.media.num_tokens - self.first)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        """True for the last run of its medium."""
        return self.first + self.length == self.media.num_tokens
