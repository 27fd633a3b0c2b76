"""Decodes mutated clips and clips that lie about themselves. Each must give samples or a MediaError, in bounded time
and memory.

    python -m tests.fuzz.sounds --cases 2000 [--first 0]

A case fails as an image does (`tests.fuzz.images`). The last line is one JSON object; the exit code is 1 if any case
failed. FLAC, MP3 and Ogg are only in it with the `soundfile` library.
"""

from __future__ import annotations

import importlib.util
import io
import random
import struct
import sys
from collections.abc import Iterator
from functools import cache

import numpy as np

from pace.llm.processors.qwen_audio import Qwen3OmniAudioProcessor
from tests.fuzz.images import Case, main, mutate
from tests.media.wavs import chunk, format_chunk, riff, speech, wav

PROCESSOR = Qwen3OmniAudioProcessor(feature_size=128)


def read(data: bytes) -> str:
    """Prepares a clip; "sound" if it is one whose tokens were counted from its header."""
    tokens = PROCESSOR.layout(data).num_tokens
    media = PROCESSOR.prepare(data)
    if media.num_tokens != tokens:
        return "FAIL: another number of tokens"
    return "sound" if np.isfinite(media.features).all() else "FAIL: not finite"


@cache
def files() -> dict[str, bytes]:
    """Name -> a healthy file."""
    samples = speech(0.4)
    both = np.stack([samples, -samples], 1)
    whole = (both * 20000).astype("<i4")
    found = {
        "wav 8": wav((samples * 100 + 128).astype(np.uint8), bits=8, rate=8000),
        "wav 16": wav(whole.astype("<i2"), channels=2, rate=44100),
        "wav 24": wav((whole << 8).view(np.uint8).reshape(-1, 4)[:, 1:], channels=2, bits=24, extensible=True),
        "wav 32": wav(whole << 8, channels=2, bits=32, rate=48000),
        "wav float": wav(samples.astype("<f4"), 3, bits=32, extensible=True),
        "wav double": wav(samples.astype("<f8"), 3, bits=64, rate=22050),
        "wav from a pipe": wav(whole.astype("<i2"), channels=2, size=0xFFFFFFFF),
    }
    if importlib.util.find_spec("soundfile"):
        found |= {name: encoded(samples, 16000, name) for name in ("FLAC", "OGG", "MP3")}
    return found


def encoded(samples: np.ndarray, rate: int, form: str) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form)
    return file.getvalue()


def mutated(seed: int) -> tuple[str, bytes]:
    """Name of a file, and its bytes after one to three mutations."""
    rng = random.Random(seed)
    name = rng.choice(sorted(files()))
    return name, bytes(mutate(rng, files()[name]))


def lies() -> dict[str, bytes]:
    """Name -> a file that contradicts itself, or is beyond a limit."""
    content = (speech(0.4) * 20000).astype("<i2").tobytes()
    mono = format_chunk(1, 1, 16000, 16)
    found = {
        "wav that claims all memory": wav(content, size=0x7FFFEFFE),
        "wav with one sample too few": wav(content, size=len(content) + 2),
        "wav of half a sample": wav(content, size=len(content) - 1),
        "wav of no samples": wav(b""),
        "wav of too few samples": wav(content[:400]),
        "wav of an hour": wav(bytes(4000 * 3600), bits=8, rate=4000),
        "wav at the highest rate": wav(content, rate=2**32 - 1),
        "wav at rate 0": wav(content, rate=0),
        "wav at a rate that has nothing in common": wav(content, rate=191999),
        "wav of 65535 channels": riff(chunk(b"fmt ", struct.pack("<HHIIHH", 1, 65535, 16000, 0, 65534, 16))),
        "wav of many chunks": riff(*[chunk(b"abcd", b"")] * 500_000, mono, chunk(b"data", content)),
        "wav with a long chunk": riff(chunk(b"abcd", b"", 2**32 - 1), mono, chunk(b"data", content)),
        "wav within wav": riff(chunk(b"RIFF", wav(content))),
        "wav of nan": wav(np.full(5000, np.nan, "<f4"), 3, bits=32),
        "wav of infinity": wav(np.full(5000, -np.inf, "<f8"), 3, bits=64),
        "wav of large numbers": wav(np.full(5000, 1e38, "<f4"), 3, bits=32),
        "mu-law": wav(content, 7, bits=8),
        "zeros": bytes(1 << 20),
        "a picture": b"\x89PNG\r\n\x1a\n" + content,
    }
    if importlib.util.find_spec("soundfile"):
        found["flac of 20 minutes"] = encoded(np.zeros(4000 * 1200, np.float32), 4000, "FLAC")
        found["flac of 3 channels"] = encoded(np.zeros((8000, 3), np.float32), 16000, "FLAC")
        flac = files()["FLAC"]
        found["flac that claims more"] = flac[:21] + b"\x0f\xff\xff\xff\xff" + flac[26:]
        found["flac without frames"] = flac[:42]
        found["ogg of a page"] = files()["OGG"][:58]
    return found


def cuts() -> dict[str, bytes]:
    """Name -> a WAV file, cut at every hundredth of its length. Other formats may end anywhere."""
    return {
        f"{name} cut at {percent} %": data[: len(data) * percent // 100]
        for name, data in files().items()
        for percent in range(100)
        if name.startswith("wav") and "pipe" not in name
    }


def cases(num_cases: int, first: int) -> Iterator[Case]:
    for name, data in files().items():
        yield name, data, {"sound"}
    for name, data in (lies() | cuts()).items():
        yield name, data, {"MediaError"}
    for seed in range(first, first + num_cases):
        name, data = mutated(seed)
        yield f"seed {seed}, {name}", data, {"sound", "MediaError"}


if __name__ == "__main__":
    sys.exit(main(__doc__, cases, files().values(), read))
