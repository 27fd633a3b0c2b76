"""Parts of a tokenizer.json, made of vocabularies that come in other files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pace import _C
from pace.checkpoints.files import git_lfs_message, is_git_lfs_pointer, open_regular, read_at

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens: those of tokenizer.ggml.token_type, and of sentencepiece's pieces."""
SPACE = "▁"
"""How sentencepiece writes a space."""
MAX_PIECE = 256
"""Characters of a piece that others may make; sentencepiece makes them of at most 16 unless told otherwise."""
MAX_VOCABULARY_BYTES = 64 << 20
"""The largest vocabulary known takes 5 MB."""


def _byte_letters() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()
"""The letters that byte-level BPE writes bytes with: printable bytes as they are, the others from U+0100 on. Source:
GPT-2's encoder (openai/gpt-2, encoder.py)."""


def read_vocabulary(path: Path) -> bytes:
    """The bytes of a vocabulary's file. Raises what `open_regular` does, and ValueError that names the file."""
    descriptor = open_regular(path)
    try:
        data = read_at(descriptor, path, MAX_VOCABULARY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_VOCABULARY_BYTES:
        raise ValueError(f"{path} is larger than {MAX_VOCABULARY_BYTES:,} bytes, which no vocabulary is")
    if is_git_lfs_pointer(data):
        raise ValueError(git_lfs_message(path))
    return data


def sentencepiece_parts(
    tokens: list[str],
    scores: np.ndarray,
    types: np.ndarray,
    unknown: int | None,
    prefix: bool,
    before: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Normalizer, decoder and model of a sentencepiece vocabulary of the kind BPE. `prefix`: a text gets a space in
    front; `before`: normalizers that come first."""
    vocabulary = dict(zip(tokens, range(len(tokens))))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    front = [{"type": "Prepend", "prepend": SPACE}] * prefix
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, *front, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": bpe_model(
            vocabulary,
            merges_by_score(tokens, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)),
        ),
    }


def merges_by_score(tokens: list[str], scores: np.ndarray, types: np.ndarray) -> list[tuple[str, str]]:
    """Sentencepiece joins the two neighbours that make the piece of the highest score: every pair that makes a piece,
    the best first. Of a piece the pair with the shorter left part comes first."""
    is_piece = (types == NORMAL) | (types == USER_DEFINED)
    pieces = [token if wanted and len(token) <= MAX_PIECE else None for token, wanted in zip(tokens, is_piece.tolist())]
    best_first = np.argsort(-scores, kind="stable").astype(np.uint32)
    return _C.find_merges(pieces, best_first)


def bpe_model(vocabulary: dict[str, int], merges: list, **options: Any) -> dict[str, Any]:
    """The model of a tokenizer.json."""
    common = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **common, **options, "vocab": vocabulary, "merges": merges}


def added_token(index: int, content: str, special: bool = True) -> dict[str, Any]:
    """A token that is found in a text before anything else is."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, "special": special, **plain}


def text_with_ends(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]] = ()) -> dict[str, Any] | None:
    """The post-processor that puts these tokens, names and ids, before and after a text; None where there are none."""
    ends = [*before, *after]
    if not ends:
        return None
    first, last = ([{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in part] for part in (before, after))
    text, second = ({"Sequence": {"id": which, "type_id": 0}} for which in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*first, text, *last],
        "pair": [*first, text, *last, *first, second, *last],
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]} for name, index in ends},
    }
