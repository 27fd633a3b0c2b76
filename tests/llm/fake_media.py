"""Small images and sounds, and processors of them that need no library, for the bundled model's tokenizer.

A token of an image is a square of 8 pixels, and a token of sound is 0.1 s. Two tokens that the bundled model never uses
are the placeholders."""

from __future__ import annotations

import hashlib
import io
import math
import struct
import threading
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pace.assets import TINY
from pace.llm.generator import Generator
from pace.llm.loading import load
from pace.llm.loading.options import LoadOptions
from pace.llm.processors.processor import Processors
from pace.llm.processors.prompts import PromptEncoder
from pace.llm.sequence import Sequence
from pace.media.media import Layout, Media, MediaError, MediaSpan

SIDE = 8
"""Pixels of the side of a token."""
IMAGE, AUDIO = "<|pad|>", "<|eos|>"
"""The placeholder tokens."""


def png(width: int = 16, height: int = 8, level: int = 0) -> bytes:
    """A grey PNG file, of one level."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = (b"\0" + bytes([level]) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def wav(seconds: float = 0.3, rate: int = 8000) -> bytes:
    """Silence, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(bytes(2 * round(seconds * rate)))
    return file.getvalue()


class Picture:
    """An image in memory, as a PIL image is one."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)


class FakeProcessor:
    """Reads the size of a medium, and never its contents."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.token = self.marker = {"image": IMAGE, "audio": AUDIO}[kind]
        self.placeholder = f"[{self.token}]"
        self.least_tokens = 1
        self.num_decoded = self.max_at_once = self.num_at_once = 0
        self.gate: Callable[[], None] = lambda: None
        """Is called when a medium is decoded."""
        self._lock = threading.Lock()

    def among(self, num_images: int) -> FakeProcessor:
        return self

    def layout(self, source: Any, max_tokens: int | None = None) -> Layout:
        num_tokens = self.count_tokens(source, max_tokens)
        return Layout(self.token * num_tokens, (num_tokens,))

    def count_tokens(self, source: Any, max_tokens: int | None = None) -> int:
        if isinstance(source, Picture) and self.kind == "image":
            width, height = source.size
        elif not isinstance(source, (str, Path, bytes)):
            raise TypeError(f"an image or a clip is bytes or a path; got {type(source).__name__}")
        else:
            data = source if isinstance(source, bytes) else Path(source).read_bytes()
            if self.kind == "audio":
                return _seconds_of(data)
            if len(data) < 24 or data[12:16] != b"IHDR":
                raise MediaError("it is not a whole PNG file")
            width, height = struct.unpack(">II", data[16:24])
        tokens = math.ceil(width / SIDE) * math.ceil(height / SIDE)
        return min(tokens, max_tokens or tokens)

    def prepare(self, source: Any, max_tokens: int | None = None) -> Media:
        with self._lock:
            self.num_decoded += 1
            self.num_at_once += 1
            self.max_at_once = max(self.max_at_once, self.num_at_once)
        try:
            num_tokens = self.count_tokens(source, max_tokens)
            if isinstance(source, bytes) and source.endswith(b"broken"):
                raise MediaError("it cannot be decoded")
            self.gate()
            data = source if isinstance(source, bytes) else repr(source).encode()
            features, grid = np.zeros((num_tokens, 1), np.float32), (1, 1, num_tokens)
            return Media(self.kind, features, grid, num_tokens, hashlib.sha256(data).digest())
        finally:
            with self._lock:
                self.num_at_once -= 1

    def arrays(self, media: Any) -> dict[str, np.ndarray]:
        return {f"{self.kind}_values": np.concatenate([medium.features for medium in media])}


def _seconds_of(data: bytes) -> int:
    try:
        with wave.open(io.BytesIO(data)) as reader:
            return round(10 * reader.getnframes() / reader.getframerate())
    except (wave.Error, EOFError):
        raise MediaError("it is not a WAV file") from None


def fake_processors(*kinds: str) -> Processors:
    return Processors(**{kind: FakeProcessor(kind) for kind in kinds})


class MediaGenerator(Generator):
    """A generator of the bundled model that takes media, and records them. The model has no tower, so its engine sees
    the placeholders only."""

    def __init__(self, *kinds: str, template: str | None = None, **options: Any) -> None:
        loaded = load.open_model(LoadOptions(str(TINY), progress=False, kv_cache_bytes="64MiB", **options))
        if template is not None:
            loaded.tokenizer.chat_template = template
        encoder = PromptEncoder(fake_processors(*kinds or ("image", "audio")), loaded.tokenizer)
        super().__init__(loaded.engine, loaded.tokenizer, loaded.defaults, encoder=encoder)
        self.seen: list[tuple[list[int], tuple[MediaSpan, ...]]] = []
        """Prompt and media of each sequence."""

    def sequences_of(self, call: Any, index: int) -> list[Sequence]:
        sequences = super().sequences_of(call, index)
        for sequence in sequences:
            self.seen.append((list(sequence.tokens), sequence.media))
            sequence.media = ()
        return sequences

    @property
    def image(self) -> FakeProcessor:
        return self.encoder.processors["image"]


def runs(tokens: list[int], media: tuple[MediaSpan, ...]) -> list[tuple[str, int]]:
    """Kind and length of each medium of a prompt, whose tokens are checked to be its placeholders and no others."""
    ids = {"image": 0, "audio": 2}
    places = {at for span in media for at in range(span.start, span.end)}
    assert {at for at, token in enumerate(tokens) if token in ids.values()} == places
    for span in media:
        assert set(tokens[span.start : span.end]) == {ids[span.media.kind]}
    return [(span.media.kind, span.media.num_tokens) for span in media]


PARTS_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[" + IMAGE + "]{% elif p.type == 'audio' %}[" + AUDIO + "]"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that shows images and sound as parts, as Qwen's do."""
