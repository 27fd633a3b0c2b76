"""WAV files: integers of 8 to 32 bits and floats, one or two channels."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from pace.media.media import MediaError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
COMPRESSED = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 49: "GSM", 80: "MPEG", 85: "MP3", 255: "AAC"}
"""Names of common formats that are refused."""
GUID_END = bytes.fromhex("000000001000800000aa00389b71")
"""Last 14 bytes of the identifier of a format in an extensible header; the first 2 are its number."""
UNKNOWN_SIZE = 0x7FFFF000
"""Sizes from this on say that the writer did not know the size, because it wrote to a pipe (ffmpeg, SoX, espeak)."""
MAX_CHUNKS = 1000
TYPES = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "u1", (PCM, 32): "<i4", (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}
"""Format and bits of a sample -> the elements to read. Samples of 24 bits are read byte by byte."""


@dataclass(frozen=True)
class WavFile:
    """The header of a WAV file, and where its samples are."""

    rate: int
    """Sampling rate in Hz, not yet checked."""
    channels: int
    frames: int
    """Samples of each channel."""
    kind: tuple[int, int]
    """Key of `TYPES`."""
    samples: memoryview

    def read(self) -> np.ndarray:
        """Returns float32 `[frames, channels]`; integers become -1 to 1."""
        values = np.frombuffer(self.samples, TYPES[self.kind])
        if self.kind == (PCM, 8):
            values = (values.astype(np.float32) - np.float32(128)) / np.float32(128)
        elif self.kind == (PCM, 24):
            wide = np.zeros((len(values) // 3, 4), np.uint8)
            wide[:, 1:] = values.reshape(-1, 3)  # the upper bytes, so that the sign is the int32's
            values = wide.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
        elif self.kind[0] == PCM:
            values = values.astype(np.float32) / np.float32(2 ** (self.kind[1] - 1))
        else:
            with np.errstate(over="ignore"):  # an infinite sample is refused with all others
                values = values.astype(np.float32)
        return values.reshape(self.frames, self.channels)


def read_wav_header(data: bytes) -> WavFile:
    """Returns the header of a file that begins with RIFF. Raises MediaError for a malformed or compressed file, and for
    a size of samples that the file does not have. Does not read the size of the whole file, which many writers get
    wrong."""
    if data[8:12] != b"WAVE":
        raise MediaError("the file begins as RIFF but is not a WAV file")
    view, position, form = memoryview(data), 12, None
    for _ in range(MAX_CHUNKS):
        if position + 8 > len(data):
            break
        name, size = struct.unpack_from("<4sI", data, position)
        position += 8
        if name == b"data":
            if form is None:
                raise MediaError("the WAV file has samples before their format")
            return _with_samples(form, view[position:], size)
        if size > len(data) - position:
            raise MediaError(f"a chunk of the WAV file claims {size} bytes; {len(data) - position} follow")
        if name == b"fmt ":
            form = _read_format(view[position : position + size])
        position += size + size % 2
    else:
        raise MediaError(f"the WAV file has more than {MAX_CHUNKS} chunks before its samples")
    raise MediaError("the WAV file has no samples" if form else "the WAV file has no format")


def _read_format(chunk: memoryview) -> tuple[int, int, int, tuple[int, int]]:
    """Returns the rate, the channels, the bytes of a frame, and the kind of samples."""
    if len(chunk) < 16:
        raise MediaError(f"the format of the WAV file has {len(chunk)} bytes; it needs 16")
    number, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", chunk)
    if number == EXTENSIBLE:
        if len(chunk) < 40 or bytes(chunk[26:40]) != GUID_END:
            raise MediaError("the extensible format of the WAV file is malformed or not supported")
        valid_bits = int.from_bytes(chunk[18:20], "little")
        if valid_bits > bits:
            raise MediaError(f"the WAV file claims {valid_bits} valid bits of {bits}")
        number = int.from_bytes(chunk[24:26], "little")
    if number not in (PCM, FLOAT):
        name = COMPRESSED.get(number)
        raise MediaError(
            f"the WAV file has format {number}{f' ({name})' if name else ''}; only PCM (1) and float (3) are supported"
        )
    if (number, bits) not in TYPES:
        allowed = ", ".join(str(size) for form, size in TYPES if form == number)
        raise MediaError(f"the WAV file has samples of {bits} bits; format {number} has {allowed}")
    if channels not in (1, 2):
        raise MediaError(f"the WAV file has {channels} channels; 1 or 2 are supported")
    if frame_bytes != channels * bits // 8:
        raise MediaError(f"the WAV file claims frames of {frame_bytes} bytes; {channels} x {bits} bits are not so long")
    return rate, channels, frame_bytes, (number, bits)


def _with_samples(form: tuple[int, int, int, tuple[int, int]], rest: memoryview, size: int) -> WavFile:
    rate, channels, frame_bytes, kind = form
    if size >= UNKNOWN_SIZE:
        size = len(rest) // frame_bytes * frame_bytes
    elif size > len(rest):
        raise MediaError(f"the WAV file claims {size} bytes of samples; {len(rest)} follow")
    elif size % frame_bytes:
        raise MediaError(f"the WAV file claims {size} bytes of samples, which are not whole frames of {frame_bytes}")
    return WavFile(rate, channels, size // frame_bytes, kind, rest[:size])
