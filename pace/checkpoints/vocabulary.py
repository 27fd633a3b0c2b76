"""Parts of a tokenizer.json, made from vocabularies in other files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pace import _C
from pace.checkpoints.files import read_whole

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of tokenizer.ggml.token_type and of sentencepiece's pieces."""
SPACE = "▁"
"""Character that sentencepiece uses for a space."""
MAX_PIECE = 256
"""Maximum number of characters of a piece that merges are found for. sentencepiece makes pieces of at most 16 by
default."""
MAX_VOCABULARY_BYTES = 64 << 20
"""The largest known vocabulary takes 5 MB."""

KEPT_SETTINGS = (
    "bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "model_max_length",
    "additional_special_tokens",
)  # fmt: skip
"""Settings of tokenizer_config.json that count if a checkpoint defines its tokenizer in code."""


def _byte_letters() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()
"""Letters that byte-level BPE uses for bytes. Printable bytes stand for themselves, the others are numbered from
U+0100. Source: GPT-2's encoder (openai/gpt-2, encoder.py)."""


def read_vocabulary(path: Path) -> bytes:
    """Reads the bytes of a vocabulary file. Raises what `read_whole` raises."""
    return read_whole(path, MAX_VOCABULARY_BYTES)


def listed_tokens(path: Path, settings: dict[str, Any]) -> dict[int, str]:
    """Returns the tokens of a tokenizer_config.json's `added_tokens_decoder`. Raises ValueError that names the file."""
    found = {}
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        if not (isinstance(token, dict) and isinstance(token.get("content"), str) and index.isdecimal()):
            raise ValueError(f"{path}: added_tokens_decoder must map ids to tokens with a content; got {index!r}")
        found[int(index)] = token["content"]
    return found


def settings_of_code(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns KEPT_SETTINGS of `settings`, which are those of tokenizer_config.json, and the defaults of that code. A
    chat template may be in a file of its own, chat_template.jinja, which counts more."""
    kept = {name: settings[name] for name in KEPT_SETTINGS if settings.get(name) is not None}
    if (template := directory / "chat_template.jinja").is_file():
        kept["chat_template"] = template.read_text(encoding="utf-8")
    return {"padding_side": "left", "clean_up_tokenization_spaces": False, **kept}


def sentencepiece_parts(
    tokens: list[str],
    merges: list[tuple[str, ...]],
    unknown: int | None,
    prefix: bool,
    before: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the normalizer, decoder and model of a sentencepiece BPE vocabulary.

    `prefix`: True puts a space in front of a text.
    `before`: normalizers that run first."""
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
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)),
        ),
    }


def merges_by_score(tokens: list[str], scores: np.ndarray, types: np.ndarray) -> list[tuple[str, str]]:
    """Merges in the order of sentencepiece, which joins the two neighbours that make the piece with the highest score.
    These are all pairs that make a piece, best first. Among pairs for one piece, shorter left parts come first."""
    is_piece = (types == NORMAL) | (types == USER_DEFINED)
    pieces = [token if wanted and len(token) <= MAX_PIECE else None for token, wanted in zip(tokens, is_piece.tolist())]
    best_first = np.argsort(-scores, kind="stable").astype(np.uint32)
    return _C.find_merges(pieces, best_first)


def bpe_model(vocabulary: dict[str, int], merges: list, **options: Any) -> dict[str, Any]:
    """Returns the `model` of a tokenizer.json."""
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
    """An added token of a tokenizer.json. Added tokens are matched in a text before anything else."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, "special": special, **plain}


Token = tuple[str, int]
"""Name and id."""


def text_with_ends(before: Sequence[Token], after: Sequence[Token] = ()) -> dict[str, Any] | None:
    """Post-processor that puts the tokens `before` and `after` around a text, and around each text of a pair. None if
    there are none."""
    return _template(before, after, [*after, *before], 0) if before or after else None


def pair_with_ends(
    before: Sequence[Token], after: Sequence[Token], between: Sequence[Token], second_type: int = 0
) -> dict[str, Any] | None:
    """Post-processor of an encoder: the second text of a pair comes after `after` and `between`, and it and its end
    have the token type `second_type`. None without any tokens."""
    return _template(before, after, [*after, *between], second_type) if before or after or between else None


def _template(
    before: Sequence[Token], after: Sequence[Token], middle: Sequence[Token], second_type: int
) -> dict[str, Any]:
    def specials(tokens: Sequence[Token], kind: int = 0) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": kind}} for name, _ in tokens]

    first, second = ({"Sequence": {"id": which, "type_id": kind}} for which, kind in (("A", 0), ("B", second_type)))
    used = [*before, *after, *middle]
    return {
        "type": "TemplateProcessing",
        "single": [*specials(before), first, *specials(after)],
        "pair": [*specials(before), first, *specials(middle), second, *specials(after, second_type)],
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]} for name, index in used},
    }
