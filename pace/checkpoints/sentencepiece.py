"""Reads sentencepiece vocabularies (`tokenizer.model`) without the sentencepiece library.

The file is a protocol buffer message, `ModelProto` of sentencepiece_model.proto. A field has a number, a wire type and
a value. These fields are read:

    1 pieces            1 piece, 2 score (float32), 3 type

    2 trainer_spec      3 model_type (1 unigram, 2 BPE), 40 unk_id, 41 bos_id, 42 eos_id

    3 normalizer_spec   2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pace.checkpoints.vocabulary import NORMAL, SPACE, merges_by_score, sentencepiece_parts

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
BPE = 2


class SentencePiece(NamedTuple):
    """Contents of a tokenizer.model."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unknown: int
    begin: int
    end: int
    charsmap: bytes
    """Compiled character replacements; b"" for none."""
    add_prefix: bool
    """True if a space is put in front of a text."""
    one_space: bool
    """True if spaces at the ends of a text are dropped and runs of spaces become one."""

    def parts(self) -> dict[str, Any]:
        """Returns the normalizer, decoder and model of a tokenizer.json."""
        before: list[dict[str, Any]] = []
        if self.charsmap:
            before.append(
                {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(self.charsmap).decode("ascii")}
            )
        if self.one_space:
            for pattern, content in ((" {2,}", " "), (rf"\A +|[ {SPACE}]+\z", "")):
                before.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
        merges = merges_by_score(self.pieces, np.array(self.scores, np.float32), np.array(self.types))
        return sentencepiece_parts(self.pieces, merges, self.unknown, self.add_prefix, before)


def read_sentencepiece(path: Path, data: bytes) -> SentencePiece:
    """Parses `data`, the bytes of `path`. Raises ValueError (damaged) or NotImplementedError (not BPE), which name the
    file."""
    try:
        return _read(data)
    except (ValueError, struct.error, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a sentencepiece vocabulary, or is damaged: {error}") from None
    except NotImplementedError as error:
        raise NotImplementedError(f"{path}: {error}") from None


def _read(data: bytes) -> SentencePiece:
    pieces, scores, types = [], [], []
    trainer: dict[int, Any] = {3: 1, 40: 0, 41: 1, 42: 2}
    normalizer: dict[int, Any] = {2: b"", 3: 1, 4: 1, 5: 1}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append(_bytes(piece[1]).decode("utf-8"))
            scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            types.append(_number(piece.get(3, NORMAL)))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(value))
    if _number(trainer[3]) != BPE:
        raise NotImplementedError(f"model_type {trainer[3]} is not implemented; implemented: {BPE} (BPE)")
    if not normalizer[5]:
        raise NotImplementedError("escape_whitespaces = false is not implemented")
    if len(set(pieces)) < len(pieces):
        raise ValueError("it has a piece twice, so the tokens of a text are ambiguous")
    ids = [_signed(_number(trainer[number])) for number in (40, 41, 42)]
    if not 0 <= ids[0] < len(pieces):
        raise ValueError(f"unk_id must be one of {len(pieces)} pieces; got {ids[0]}")
    return SentencePiece(pieces, scores, types, *ids, _bytes(normalizer[2]), bool(normalizer[3]), bool(normalizer[4]))


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("it has a number in place of text")
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("it has text in place of a number")
    return value


def _signed(value: int) -> int:
    """Negative numbers are stored as unsigned 64-bit numbers."""
    return value - 2**64 if value >= 2**63 else value


def _fields(data: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields field numbers and values of a message: an int for varints, bytes for fields with a length or a fixed
    size."""
    data, at = _bytes(data), 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, size = tag & 7, {FIXED64: 8, FIXED32: 4}.get(tag & 7, 0)
        if kind == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif not size:
            raise ValueError(f"it has a field of the wire type {kind} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes at byte {at} reaches beyond its end")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a number stored in groups of seven bits, lowest first. Returns it and the position after it."""
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise ValueError(f"it has a number of more than 64 bits at byte {at}")
