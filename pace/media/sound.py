"""Sound as mono float32 samples: WAV by a reader of our own; FLAC, MP3 and Ogg by the `soundfile` library."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pace.media.media import MediaError
from pace.media.resample import num_weights, resample
from pace.media.wav import read_wav_header

MAX_SECONDS = 600
RATES = (4000, 192000)
"""Lowest and highest sampling rate in Hz."""
MAX_SAMPLES = MAX_SECONDS * 48000 * 2
"""Maximum samples of all channels: a compressed file of a few bytes may hold any number."""
MAX_WEIGHTS = 2 << 20
"""Maximum number of weights of the filter from one sampling rate to the other: less than a second of work."""
MAX_BYTES = 256 << 20
MAX_LEVEL = 65536.0
"""Maximum size of a sample. The range is -1 to 1; files that hold integers as floats are still read."""
PIECE = 1 << 20
"""Frames decoded at once."""
EXTRA = 'pip install "pace-llm[audio]"'

SoundSource = bytes | str | os.PathLike | np.ndarray | tuple[np.ndarray, int]
"""The bytes or the path of a file, samples at the rate that is wanted, or samples with their rate."""


@dataclass(frozen=True)
class Sound:
    """A clip before it is decoded."""

    rate: int
    """Sampling rate in Hz."""
    frames: int
    """Samples of each channel; more than 0."""
    decode: Callable[[], np.ndarray]
    """Returns float32 `[frames, channels]`, or `[frames]` for one channel. Raises MediaError for a broken file."""

    def num_samples(self, rate: int) -> int:
        """Length of `samples(rate)`."""
        return -(-self.frames * rate // self.rate)

    def samples(self, rate: int) -> np.ndarray:
        """Returns float32 `[num_samples(rate)]`: the mean of the channels at another rate. Raises MediaError for a
        broken file, and for samples that are not finite or out of range."""
        values = self.decode()
        if len(values) != self.frames:
            raise MediaError(f"the sound claims {self.frames} samples and has {len(values)}")
        if not (-MAX_LEVEL <= values.min() and values.max() <= MAX_LEVEL):  # false if there is a NaN
            raise MediaError(f"the sound has a sample that is not a number from -{MAX_LEVEL:.0f} to {MAX_LEVEL:.0f}")
        return resample(_mono(values), self.rate, rate)


def open_sound(source: SoundSource, rate: int) -> Sound:
    """Opens a clip and reads its header; `rate` is the rate of an array without one.

    Raises MediaError for an unknown format and for a clip beyond the limits, and TypeError for another kind of source.
    Raises OSError for a path that cannot be read, and ImportError for FLAC, MP3 and Ogg without the `soundfile`
    library."""
    if isinstance(source, np.ndarray):
        source = (source, rate)
    sound = _of_array(*source) if _is_array(source) else _of_file(source)
    if num_weights(sound.rate, rate) > MAX_WEIGHTS:
        raise MediaError(f"sampling rates of {sound.rate} and {rate} Hz have too little in common; convert the sound")
    return sound


def _is_array(source: Any) -> bool:
    return isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], np.ndarray)


def _of_file(source: bytes | str | os.PathLike) -> Sound:
    if isinstance(source, str | os.PathLike):
        source = _read_file(source)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise TypeError(
            f"sound must be bytes, a path, an array or a pair (array, sampling rate); got {type(source).__name__}"
        )
    data = bytes(source)
    if len(data) > MAX_BYTES:
        raise MediaError(f"the sound has {len(data)} bytes; at most {MAX_BYTES} are read")
    if data[:4] == b"RIFF":
        wav = read_wav_header(data)
        _check_size(wav.rate, wav.frames, wav.channels)
        return Sound(wav.rate, wav.frames, wav.read)
    if data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or _is_mpeg(data):
        return _of_compressed(data)
    raise MediaError("the sound is not a WAV, FLAC, MP3 or Ogg file")


def _of_array(samples: np.ndarray, rate: int) -> Sound:
    if not np.issubdtype(samples.dtype, np.floating) or samples.ndim != 1:
        raise TypeError(
            "an array of sound must be one-dimensional floats from -1 to 1; "
            f"got {samples.dtype} of shape {list(samples.shape)}"
        )
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise TypeError(f"a sampling rate must be a whole number of Hz; got {rate!r}")
    _check_size(int(rate), len(samples), 1)

    def decode() -> np.ndarray:
        with np.errstate(over="ignore"):  # an infinite sample is refused with all others
            return samples.astype(np.float32)

    return Sound(int(rate), len(samples), decode)


def _read_file(path: str | os.PathLike) -> bytes:
    """Returns the bytes of a regular file; devices and pipes may have no end."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise MediaError("the path of the sound is not a file")
        if state.st_size > MAX_BYTES:
            raise MediaError(f"the sound has {state.st_size} bytes; at most {MAX_BYTES} are read")
        return file.read(MAX_BYTES + 1)


def _is_mpeg(data: bytes) -> bool:
    """Returns whether the bytes begin with the header of a frame of MPEG audio, layer III."""
    return len(data) > 3 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2


def _check_size(rate: int, frames: int, channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise MediaError(f"the sound has a sampling rate of {rate} Hz; {RATES[0]} to {RATES[1]} are supported")
    if channels not in (1, 2):
        raise MediaError(f"the sound has {channels} channels; 1 or 2 are supported")
    if frames < 1:
        raise MediaError("the sound is empty")
    if frames > MAX_SECONDS * rate:
        raise MediaError(f"the sound has {frames / rate:.1f} s; at most {MAX_SECONDS} s are read")
    if frames * channels > MAX_SAMPLES:
        raise MediaError(f"the sound has {frames * channels} samples; at most {MAX_SAMPLES} are read")


def _mono(values: np.ndarray) -> np.ndarray:
    """Returns the mean of the channels, float32 `[frames]`."""
    if values.ndim == 1:
        return values
    return values[:, 0] if values.shape[1] == 1 else (values[:, 0] + values[:, 1]) / np.float32(2)


def _of_compressed(data: bytes) -> Sound:
    try:
        import soundfile
    except ImportError as error:
        raise ImportError(f"FLAC, MP3 and Ogg need the soundfile library: {EXTRA}") from error
    file = _soundfile(soundfile.SoundFile, io.BytesIO(data))
    _check_size(file.samplerate, file.frames, file.channels)

    def decode() -> np.ndarray:
        # Reads from the start each time, so that a clip can be decoded twice and by any thread.
        with _soundfile(soundfile.SoundFile, io.BytesIO(data)) as file:
            pieces, left = [], file.frames + 1
            while left > 0 and len(piece := _soundfile(file.read, min(left, PIECE), dtype="float32")):
                left -= len(piece)
                pieces.append(_mono(piece))
        return np.concatenate(pieces) if pieces else np.empty(0, np.float32)

    return Sound(file.samplerate, file.frames, decode)


def _soundfile(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function of the library, whose errors become MediaError."""
    try:
        return function(*arguments, **options)
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        raise MediaError(f"the sound cannot be decoded: {type(error).__name__}") from None
