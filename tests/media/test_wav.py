"""WAV files: each kind of samples, and headers that contradict themselves or their bytes."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest

from pace.media.media import MediaError
from pace.media.wav import MAX_CHUNKS, read_wav_header
from tests.media.wavs import chunk, format_chunk, riff, wav

STEPS = np.array([0.0, 0.5, -0.5, -1.0, 0.25, -0.125])


def as_24_bits(values: np.ndarray) -> bytes:
    whole = (values * 2**23).astype("<i4")
    return whole.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


KINDS = [
    (1, 8, ((STEPS + 1) * 128).astype(np.uint8).tobytes()),
    (1, 16, (STEPS * 2**15).astype("<i2").tobytes()),
    (1, 24, as_24_bits(STEPS)),
    (1, 32, (STEPS * 2**31).astype("<i8").astype("<i4").tobytes()),
    (3, 32, STEPS.astype("<f4").tobytes()),
    (3, 64, STEPS.astype("<f8").tobytes()),
]


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("number", "bits", "content"), KINDS, ids=[f"{n}-{bits}" for n, bits, _ in KINDS])
def test_every_kind_of_samples(number, bits, content, extensible):
    """Powers of two are exact in every kind."""
    for channels in (1, 2):
        found = read_wav_header(wav(content, number, channels, 44100, bits, extensible))
        assert (found.rate, found.channels, found.frames) == (44100, channels, len(STEPS) // channels)
        values = found.read()
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, STEPS.astype(np.float32).reshape(-1, channels))


def test_whole_range_of_24_bits():
    extremes = [-(2**23), -(2**23) + 1, -257, -1, 0, 1, 255, 2**23 - 1]
    content = b"".join(value.to_bytes(3, "little", signed=True) for value in extremes)
    values = read_wav_header(wav(content, bits=24)).read()[:, 0]
    np.testing.assert_array_equal(values, np.array(extremes, np.float32) / 2**23)


def test_a_file_of_the_standard_library():
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((2, 2, 22050, 0, "NONE", "not compressed"))
        out.writeframes(np.arange(-6, 6, dtype="<i2").tobytes())
    found = read_wav_header(file.getvalue())
    assert (found.rate, found.channels, found.frames) == (22050, 2, 6)
    np.testing.assert_array_equal(found.read() * 2**15, np.arange(-6, 6).reshape(6, 2))


def test_other_chunks_are_passed_over():
    """A chunk of odd length is followed by a byte of padding; what follows the samples is not read."""
    content = np.array([1, -1], "<i2").tobytes()
    before = chunk(b"LIST", b"odd") + format_chunk(1, 1, 8000, 16) + chunk(b"fact", b"\2\0\0\0")
    found = read_wav_header(riff(before, chunk(b"data", content), chunk(b"id3 ", b"x" * 9), b"torn"))
    assert (found.rate, found.frames) == (8000, 2)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_files_written_to_a_pipe_end_where_the_bytes_do(size):
    found = read_wav_header(wav(b"\1\0\2\0\3\0", channels=2, size=size))
    assert found.frames == 1 and found.read().shape == (1, 2)


MONO = format_chunk(1, 1, 16000, 16)
BROKEN = [
    (b"RIFF\x04\0\0\0AVI ", "not a WAV file"),
    (riff(), "no format"),
    (riff(MONO), "no samples"),
    (riff(chunk(b"data", b"\0\0"), MONO), "samples before their format"),
    (riff(chunk(b"fmt ", b"\1\0\1\0")), "has 4 bytes; it needs 16"),
    (riff(chunk(b"LIST", b"ab", 2**31), MONO), "claims 2147483648 bytes; "),
    (wav(b"\0\0", size=4), "claims 4 bytes of samples; 2 follow"),
    (wav(b"\0\0", size=2**30), "claims 1073741824 bytes"),
    (wav(b"\0\0\0", size=3), "not whole frames of 2"),
    (wav(b"\0\0", number=7, bits=8), r"format 7 \(mu-law\)"),
    (wav(b"\0\0", number=85), r"\(MP3\)"),
    (wav(b"\0\0", number=0), "format 0; only PCM"),
    (wav(b"\0\0", number=0x1234, extensible=True), "format 4660"),
    (wav(b"\0\0", bits=12), "samples of 12 bits; format 1 has 8, 16, 24, 32"),
    (wav(b"\0\0", bits=64), "samples of 64 bits"),
    (wav(b"\0\0", number=3), "samples of 16 bits; format 3 has 32, 64"),
    (wav(b"\0\0", channels=0), "has 0 channels"),
    (wav(b"\0\0" * 6, channels=6), "has 6 channels"),
    (riff(chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 16000, 32000, 1, 16)), chunk(b"data", b"")), "frames of 1 bytes"),
    (riff(chunk(b"fmt ", struct.pack("<HHIIHHH", 0xFFFE, 1, 16000, 0, 2, 16, 0))), "extensible format"),
    (riff(*[chunk(b"junk", b"")] * (MAX_CHUNKS + 1), MONO), f"more than {MAX_CHUNKS} chunks"),
]


@pytest.mark.parametrize(("data", "problem"), BROKEN, ids=range(len(BROKEN)))
def test_broken_files_are_refused(data, problem):
    with pytest.raises(MediaError, match=problem):
        read_wav_header(data)


def test_a_file_cut_anywhere_is_refused_or_whole():
    data = wav(np.arange(40, dtype="<i2"), extensible=True)
    for length in range(12, len(data)):
        with pytest.raises(MediaError):
            read_wav_header(data[:length])


def test_extensible_formats_with_more_valid_bits_than_bits_are_refused():
    data = bytearray(wav(b"\0\0", extensible=True))
    at = data.index(b"fmt ") + 8 + 18
    data[at : at + 2] = (24).to_bytes(2, "little")
    with pytest.raises(MediaError, match="24 valid bits of 16"):
        read_wav_header(bytes(data))
