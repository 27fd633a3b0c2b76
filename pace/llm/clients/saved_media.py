"""Images and sound of a saved session: what the head of its file says about them. Their features are pieces of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pace.llm.processors.processor import NOUNS
from pace.media.media import Media, MediaSpan
from pace.naming import shown

FEATURE = np.dtype("<f4")
FIELDS = tuple(field.name for field in dataclasses.fields(Media) if field.name not in ("features", "digest"))
WRONG_FORM = "its head describes media in another form"


def whole_media(spans: Iterable[MediaSpan]) -> list[Media]:
    """Each medium once, in order."""
    return [span.media for span in spans if not span.first]


def describe(spans: Sequence[MediaSpan]) -> list[dict[str, Any]]:
    """Returns the entry of each medium in a head: all but its features, and the first tokens of its runs."""
    entries: list[dict[str, Any]] = []
    for span in spans:
        media = span.media
        if not span.first:
            entry = {name: getattr(media, name) for name in FIELDS}
            entries.append(entry | {"shape": media.features.shape, "digest": media.digest.hex(), "starts": []})
        entries[-1]["starts"].append(span.start)
    return entries


def feature_bytes(media: Media) -> memoryview:
    return np.ascontiguousarray(media.features, FEATURE).data.cast("B")


def read_media(
    entries: Any, pieces: Sequence[memoryview], tokens: Sequence[int], placeholders: Mapping[str, int]
) -> tuple[MediaSpan, ...]:
    """Makes the media of a saved session from their entries and features. `placeholders`: kind -> token of the model's
    towers. Raises ValueError without the file's name."""
    if not isinstance(entries, list):
        raise ValueError(WRONG_FORM)
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


def _read_entry(entry: Any, data: memoryview, placeholders: Mapping[str, int]) -> tuple[Media, list[int]]:
    if not isinstance(entry, dict) or entry.keys() != {*FIELDS, "shape", "digest", "starts"}:
        raise ValueError(WRONG_FORM)
    fields = {name: entry[name] for name in FIELDS}
    shape, digest, starts = entry["shape"], entry["digest"], entry["starts"]
    kind, runs, num_tokens = fields["kind"], fields["runs"], fields["num_tokens"]
    right = (
        isinstance(kind, str)
        and _has_shape(fields["grid"], 3, kind == "image")
        and _has_shape(fields["thumbnail"], 2, False)
        and _has_shape(fields["canvas"], 4, False)
        and type(num_tokens) is int
        and isinstance(digest, str)
        and _are_counts(shape, 1)
        and 4 * math.prod(shape) == len(data)
        and _are_counts(runs, 1)
        and _are_counts(starts, 0)
        and len(runs) == len(starts)
        and sum(runs) == num_tokens
    )
    if not right:
        raise ValueError(WRONG_FORM)
    if kind not in placeholders:
        raise ValueError(f"it has {NOUNS.get(kind, shown(kind))}, and this model is loaded without a tower for them")
    features = np.frombuffer(data, FEATURE).reshape(shape).astype(np.float32, copy=False)
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Media(features=features, digest=_bytes_of(digest), **plain), starts


def _has_shape(values: Any, length: int, required: bool) -> bool:
    return values is None and not required or _are_counts(values, 1) and len(values) == length


def _are_counts(values: Any, minimum: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= minimum for value in values)


def _bytes_of(digest: str) -> bytes:
    try:
        return bytes.fromhex(digest)
    except ValueError:
        raise ValueError(WRONG_FORM) from None
