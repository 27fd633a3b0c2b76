"""Images and sound of a saved session: what the head of its file says about them. Their features are pieces of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pace.llm.processors.processor import NOUNS
from pace.media.media import Media, MediaSpan
from pace.naming import shown

FEATURE = np.dtype("<f4")


def whole_media(spans: Iterable[MediaSpan]) -> list[Media]:
    """Each medium once, in order."""
    return [span.media for span in spans if not span.first]


def describe(spans: Sequence[MediaSpan]) -> list[dict[str, Any]]:
    """Returns the entry of each medium in a head: all but its features."""
    entries: list[dict[str, Any]] = []
    for span in spans:
        media = span.media
        if not span.first:
            entries.append(
                {
                    "kind": media.kind,
                    "grid": media.grid,
                    "shape": media.features.shape,
                    "digest": media.digest.hex(),
                    "lengths": media.runs,
                    "starts": [],
                }
            )
        entries[-1]["starts"].append(span.start)
    return entries


def feature_bytes(media: Media) -> memoryview:
    return np.ascontiguousarray(media.features, FEATURE).data.cast("B")


def read_media(
    entries: Any, pieces: Sequence[bytearray], tokens: Sequence[int], placeholders: Mapping[str, int]
) -> tuple[MediaSpan, ...]:
    """Makes the media of a saved session from their entries and features. `placeholders`: kind -> token of the model's
    towers. Raises ValueError without the file's name."""
    if len(entries) != len(pieces):
        raise ValueError("its head describes other media than it has")
    spans: list[MediaSpan] = []
    for entry, data in zip(entries, pieces):
        media, starts = _read_entry(entry, data, placeholders)
        first = 0
        for start, length in zip(starts, media.runs):
            end = spans[-1].end if spans else 0
            if start < end or any(token != placeholders[media.kind] for token in tokens[start : start + length]):
                raise ValueError("its media are not at their placeholders")
            spans.append(MediaSpan(start, media, first, length=length))
            first += length
    if spans and spans[-1].end > len(tokens):
        raise ValueError("its media are not at their placeholders")
    return tuple(spans)


def _read_entry(entry: Any, data: bytearray, placeholders: Mapping[str, int]) -> tuple[Media, list[int]]:
    fields = entry if isinstance(entry, dict) else {}
    kind, grid, digest = (fields.get(name) for name in ("kind", "grid", "digest"))
    shape, lengths, starts = (fields.get(name) for name in ("shape", "lengths", "starts"))
    right = (
        isinstance(kind, str)
        and isinstance(digest, str)
        and (grid is None or _are_counts(grid, 1) and len(grid) == 3)
        and _are_counts(shape, 1)
        and 4 * math.prod(shape) == len(data)
        and _are_counts(lengths, 1)
        and _are_counts(starts, 0)
        and len(lengths) == len(starts) > 0
    )
    if not right:
        raise ValueError("its head describes media in another form")
    if kind not in placeholders:
        raise ValueError(f"it has {NOUNS.get(kind, shown(kind))}, and this model is loaded without a tower for them")
    features = np.frombuffer(data, FEATURE).reshape(shape).astype(np.float32, copy=False)
    media = Media(kind, features, None if grid is None else tuple(grid), sum(lengths), _bytes_of(digest), tuple(lengths))
    return media, starts


def _are_counts(values: Any, minimum: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= minimum for value in values)


def _bytes_of(digest: str) -> bytes:
    try:
        return bytes.fromhex(digest)
    except ValueError:
        raise ValueError("its head describes media in another form") from None
