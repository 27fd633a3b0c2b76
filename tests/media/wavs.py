"""WAV files for tests, written byte by byte."""

from __future__ import annotations

import struct

import numpy as np

from pace.media.wav import GUID_END


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    size = len(content) if size is None else size
    return name + struct.pack("<I", size) + content + b"\0" * (len(content) % 2)


def format_chunk(number: int, channels: int, rate: int, bits: int, extensible: bool = False) -> bytes:
    frame = channels * bits // 8
    head = struct.pack("<HHIIHH", 0xFFFE if extensible else number, channels, rate, rate * frame % 2**32, frame, bits)
    if extensible:
        head += struct.pack("<HHIH", 22, bits, 0, number) + GUID_END
    return chunk(b"fmt ", head)


def riff(*chunks: bytes) -> bytes:
    content = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content)) + content


def wav(
    samples: bytes | np.ndarray,
    number: int = 1,
    channels: int = 1,
    rate: int = 16000,
    bits: int = 16,
    extensible: bool = False,
    size: int | None = None,
) -> bytes:
    """Returns a file; `size` is what the chunk of samples claims."""
    content = samples if isinstance(samples, bytes) else np.ascontiguousarray(samples).tobytes()
    return riff(format_chunk(number, channels, rate, bits, extensible), chunk(b"data", content, size))


def speech(seconds: float, rate: int = 16000, seed: int = 0) -> np.ndarray:
    """float32 samples: a gliding tone with overtones, pauses and noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    phase = 2 * np.pi * (120 * t + 15 * np.sin(2 * np.pi * 0.7 * t))
    voice = sum(np.sin(n * phase) / n for n in (1, 2, 3, 5, 8)) * (np.sin(2 * np.pi * 1.3 * t) > -0.5)
    return (0.2 * voice + 0.01 * rng.standard_normal(len(t))).astype(np.float32)
