"""Reads tiktoken vocabularies: text files with a token's bytes in base64 and its rank on each line."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from pace.checkpoints.vocabulary import BYTE_LETTERS, bpe_model

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern with which GPT-4 and GLM-4 split texts before merging."""


def read_tiktoken(path: Path, data: bytes, pattern: str = SPLIT_PATTERN) -> dict[str, Any]:
    """Returns the normalizer, pre-tokenizer, decoder and model of a tokenizer.json. `pattern` splits texts before
    merging. Raises ValueError that names the file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}: line {number} must be a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{path} must rank its tokens from 0 without gaps, and have a token for each byte")
    # BPE joins the two neighbours whose token has the lowest rank. So the merges are all pairs that make a token, in
    # order of rank.
    pairs = [
        (rank, token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges = [(_letters(left), _letters(right)) for _, left, right in sorted(pairs)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": bpe_model({_letters(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True),
    }


def _letters(token: bytes) -> str:
    return "".join(BYTE_LETTERS[byte] for byte in token)
