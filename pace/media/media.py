"""Prepared images and clips, and the error for media that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class MediaError(ValueError):
    """An image or clip that cannot be read or exceeds a limit. Its message is a sentence without any of the data."""


@dataclass(frozen=True, eq=False)
class Media:
    """One prepared image or clip."""

    kind: str
    """"image" or "audio"."""
    features: np.ndarray
    """float32. An image: patches `[N, K]` in the tower's order. Sound: the log-mel spectrogram `[mels, frames]`."""
    grid: tuple[int, int, int] | None
    """Frames, rows and columns of an image's patches; None for sound."""
    num_tokens: int
    """Placeholder tokens in the prompt, and rows that the tower returns."""
    digest: bytes
    """SHA-256 of the decoded pixels or samples, their size and the processor's settings. Equal digests mean equal
    features."""


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """The tokens `start .. start + media.num_tokens - 1` of a prompt stand for `media`."""

    start: int
    media: Media

    @property
    def end(self) -> int:
        """Position after the last of them."""
        return self.start + self.media.num_tokens
