"""Log-mel spectrograms of speech, with the bits of transformers' front ends of Whisper and Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

SAMPLING_RATE = 16000
"""Hz of all samples here."""
MIN_MEL, MIN_HERTZ = 15.0, 1000.0
"""Where Slaney's scale turns from linear to logarithmic."""
MAX_HERTZ = 8000.0
RANGE = 8.0
"""Decades below the loudest value, at which all others are cut off."""
BLOCK = 2048
"""Frames that are computed together. A product of a few frames would have other bits than one of the whole clip."""


def log_mel(samples: np.ndarray, num_mels: int, n_fft: int = 400, hop: int = 160) -> np.ndarray:
    """Returns float32 `[num_mels, N // hop]` for float32 samples `[N]` at 16 kHz.

    Frames are centred, and reflected at the ends: N must be above `n_fft / 2`. A value is `log10` of the power in a
    band of Slaney's scale, and at most 8 below the loudest of the clip. Then it is scaled to about -1 to 1.
    """
    window, filters = torch.hann_window(n_fft), mel_filters(num_mels, n_fft).T
    padded = torch.from_numpy(np.pad(samples, n_fft // 2, mode="reflect"))
    loudness = torch.empty(num_mels, len(samples) // hop)
    for start, stop in _blocks(loudness.shape[1]):
        part = padded[start * hop : (stop - 1) * hop + n_fft]
        spectrum = torch.stft(part[None], n_fft, hop, window=window, center=False, return_complex=True)
        power = (spectrum.abs() ** 2).contiguous()
        loudness[:, start:stop] = torch.clamp(filters @ power, min=1e-10).log10()[0]
    torch.maximum(loudness, loudness.max() - RANGE, out=loudness)
    return loudness.add_(4.0).div_(4.0).numpy()


def _blocks(num_frames: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of `BLOCK` frames; the last has up to `2 * BLOCK - 1`."""
    count = max(1, num_frames // BLOCK)
    for index in range(count):
        yield index * BLOCK, num_frames if index == count - 1 else (index + 1) * BLOCK


@cache
def mel_filters(num_mels: int, n_fft: int) -> Tensor:
    """Returns float32 `[n_fft / 2 + 1, num_mels]`: triangles over the frequencies of a transform, of equal area, whose
    corners are evenly spaced on Slaney's scale up to 8 kHz. Computed in float64."""
    steps = np.log(6.4) / 27.0
    mels = np.linspace(0.0, MIN_MEL + np.log(MAX_HERTZ / MIN_HERTZ) * (27.0 / np.log(6.4)), num_mels + 2)
    corners = np.where(mels >= MIN_MEL, MIN_HERTZ * np.exp(steps * (mels - MIN_MEL)), 200.0 * mels / 3.0)
    frequencies = np.linspace(0, SAMPLING_RATE // 2, n_fft // 2 + 1)
    widths, distances = np.diff(corners), corners[None] - frequencies[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return torch.from_numpy(triangles * (2.0 / (corners[2:] - corners[:-2]))).float()


def log_mel_of_magnitudes(
    samples: np.ndarray, num_mels: int, length: int, hop: int, n_fft: int, floor: float
) -> np.ndarray:
    """Returns float32 `[frames, num_mels]` for float32 samples `[N]` at 16 kHz, with the bits of Gemma 4's front end in
    transformers. A value is the natural logarithm of the magnitudes in a band of the HTK scale, plus `floor`.

    A frame has `length` samples; one more must follow it."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, length + 1)[::hop, :-1]
    spectrum = np.fft.rfft((frames * np.hanning(length + 1)[:-1].astype(np.float32))[None], n=n_fft, axis=-1)
    return np.log(np.matmul(np.abs(spectrum), htk_filters(num_mels, n_fft)) + np.float64(floor))[0].astype(np.float32)


@cache
def htk_filters(num_mels: int, n_fft: int) -> np.ndarray:
    """Returns float64 `[n_fft / 2 + 1, num_mels]`: triangles of height 1 over the frequencies of a transform. Their
    corners are evenly spaced on the HTK scale up to 8 kHz."""
    highest = 2595.0 * np.log10(1.0 + MAX_HERTZ / 700.0)
    corners = 700.0 * (np.power(10, np.linspace(0.0, highest, num_mels + 2) / 2595.0) - 1.0)
    frequencies = np.linspace(0, SAMPLING_RATE // 2, n_fft // 2 + 1)
    widths, distances = np.diff(corners), corners[None] - frequencies[:, None]
    return np.maximum(0.0, np.minimum(-distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]))
