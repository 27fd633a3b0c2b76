"""Sound from bytes, paths and arrays: one channel at the rate that is asked for, and the limits."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path

import numpy as np
import pytest

from pace.media import sound as module
from pace.media.media import MediaError
from pace.media.resample import resample
from pace.media.sound import MAX_SECONDS, open_sound
from tests.media.wavs import riff, speech, wav


def decoded(source, rate: int = 16000) -> np.ndarray:
    sound = open_sound(source, rate)
    samples = sound.samples(rate)
    assert samples.dtype == np.float32 and samples.shape == (sound.num_samples(rate),)
    return samples


def test_two_channels_are_mixed():
    pairs = np.array([[100, 300], [-4000, 4000], [32767, 32767]], "<i2")
    np.testing.assert_array_equal(decoded(wav(pairs, channels=2)) * 2**15, [200, 0, 32767])


def test_sources_are_bytes_paths_and_arrays(tmp_path):
    samples = speech(0.2)
    data = wav(samples.astype("<f4"), number=3, bits=32)
    path = tmp_path / "clip.wav"
    path.write_bytes(data)
    for source in (data, bytearray(data), memoryview(data), path, str(path), samples, samples.astype(np.float64)):
        np.testing.assert_array_equal(decoded(source), samples)
    np.testing.assert_array_equal(decoded((samples, 16000)), samples)
    np.testing.assert_array_equal(decoded(samples[::-1]), samples[::-1])


@pytest.mark.parametrize("rate", [8000, 44100])
def test_other_rates_are_resampled(rate):
    samples = speech(0.5, rate)
    wanted = resample(samples, rate, 16000)
    np.testing.assert_array_equal(decoded(wav(samples.astype("<f4"), 3, 1, rate, 32)), wanted)
    np.testing.assert_array_equal(decoded((samples, rate)), wanted)


@pytest.mark.parametrize(
    ("source", "error", "problem"),
    [
        (b"", MediaError, "not a WAV, FLAC, MP3 or Ogg file"),
        (b"\x89PNG\r\n\x1a\n", MediaError, "not a WAV"),
        (riff(), MediaError, "no format"),
        (wav(b""), MediaError, "is empty"),
        (wav(b"\0\0", rate=3999), MediaError, "3999 Hz; 4000 to 192000"),
        (wav(b"\0\0", rate=2**32 - 1), MediaError, "4294967295 Hz"),
        (wav(b"\0\0", rate=44101), MediaError, "44101 and 16000 Hz have too little in common"),
        ((np.zeros(10), 191999), MediaError, "191999 and 16000 Hz have too little in common"),
        (wav(b"\0" * (MAX_SECONDS * 4000 + 1), rate=4000, bits=8), MediaError, "600.0 s; at most 600 s"),
        (wav(np.array([0, np.nan], "<f4"), 3, bits=32), MediaError, "not a number from"),
        (wav(np.array([0, np.inf], "<f4"), 3, bits=32), MediaError, "not a number from"),
        (wav(np.array([0, -1e6], "<f4"), 3, bits=32), MediaError, "-65536 to 65536"),
        (wav(np.array([0, 1e300], "<f8"), 3, bits=64), MediaError, "not a number from"),
        (np.array([0.0, np.nan]), MediaError, "not a number from"),
        (np.array([]), MediaError, "is empty"),
        ((np.zeros(10), 100), MediaError, "100 Hz"),
        ((np.zeros(10), 16000.5), TypeError, "whole number of Hz; got 16000.5"),
        ((np.zeros(10), True), TypeError, "whole number"),
        (np.zeros(10, np.int16), TypeError, "floats from -1 to 1; got int16 of shape"),
        (np.zeros((2, 10)), TypeError, r"one-dimensional floats.*\[2, 10\]"),
        (17, TypeError, "got int"),
        (None, TypeError, "got NoneType"),
        ((np.zeros(10), 16000, 1), TypeError, "got tuple"),
    ],
)
def test_what_is_refused(source, error, problem):
    with pytest.raises(error, match=problem):
        decoded(source)


def test_paths_without_an_end_are_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", pipe, tmp_path):
        with pytest.raises((MediaError, IsADirectoryError)):
            open_sound(path, 16000)
    with pytest.raises(FileNotFoundError):
        open_sound(tmp_path / "nothing.wav", 16000)


def test_large_files_are_refused_unread(tmp_path):
    path = tmp_path / "large.wav"
    with path.open("wb") as file:
        file.truncate(module.MAX_BYTES + 1)
    with pytest.raises(MediaError, match="at most 268435456"):
        open_sound(path, 16000)


def test_many_samples_are_refused_by_the_header(monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLES", 100)
    with pytest.raises(MediaError, match="102 samples; at most 100"):
        open_sound(wav(b"\0\0" * 102, channels=2), 16000)


def test_errors_name_the_extra_without_the_library(monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "soundfile":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for data in (b"fLaC\0", b"OggS\0", b"ID3\4", b"\xff\xfb\x90\x00"):
        with pytest.raises(ImportError, match=r"pace-llm\[audio\]"):
            open_sound(data, 16000)


# -- FLAC, MP3 and Ogg -------------------------------------------------------------------------------------------------


def encoded(samples: np.ndarray, rate: int, form: str) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_compressed_files(form, tmp_path):
    samples = speech(1.5, 44100)
    both = np.stack([samples, np.roll(samples, 50)], 1)
    for values in (samples, both):
        data = encoded(values, 44100, form)
        found = decoded(data)
        wanted = resample(values if values.ndim == 1 else values.mean(1), 44100, 16000)
        assert abs(len(found) - len(wanted)) <= 2000
        if form == "FLAC":
            assert np.abs(found - wanted).max() < 2**-15
        np.testing.assert_array_equal(decoded(_saved(tmp_path, data)), found)


def _saved(folder: Path, data: bytes) -> Path:
    (folder / "clip").write_bytes(data)
    return folder / "clip"


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_torn_files_are_refused_or_read(form):
    data = encoded(speech(0.5), 16000, form)
    for length in range(4, len(data), max(1, len(data) // 50)):
        try:
            decoded(data[:length])
        except MediaError:
            pass


def test_limits_hold_for_compressed_files(monkeypatch):
    """A file of silence has a few bytes for each second."""
    data = encoded(np.zeros(4000 * 700, np.float32), 4000, "FLAC")
    assert len(data) < 100_000
    with pytest.raises(MediaError, match="700.0 s"):
        open_sound(data, 16000)
    with pytest.raises(MediaError, match="3 channels"):
        open_sound(encoded(np.zeros((50, 3)), 16000, "FLAC"), 16000)
    with pytest.raises(MediaError, match="cannot be decoded"):
        open_sound(b"fLaC" + b"\0" * 100, 16000)
