"""Vocabularies of encoders in GGUF files: WordPiece ("bert") and unigram pieces with scores ("t5").

llama.cpp reads both in src/llama-vocab.cpp. Its converter rewrites WordPiece tokens. Pieces inside of words lose their
`##`, and others get sentencepiece's mark of a space."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np

from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.gguf.tokens import Tokens
from pace.checkpoints.vocabulary import CONTROL, SPACE, UNUSED, Token, pair_with_ends

WORD_PIECES, UNIGRAM = "bert", "t5"
"""Values of tokenizer.ggml.model."""
INSIDE = "##"
"""Beginning of a WordPiece token that continues a word."""
MAX_WORD = 100
"""Maximum number of characters of a word that is split into pieces; BERT's tokenizers all have it."""
DEFAULT_IDS = {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103}
"""Special tokens of a WordPiece file that names none: those of bert-base. The key has this spelling."""
OTHER_KEYS = {"bos": "cls", "seperator": "eos"}
"""Names of the same tokens in files without the first name."""
ENDS = {"bos": "bos", "eos": "eos", "sep": "seperator"}
"""Name in the key tokenizer.ggml.add_<name>_token -> name in tokenizer.ggml.<name>_token_id."""
ONE_SEPARATOR = ("modern-bert",)
"""Values of tokenizer.ggml.pre for which one token parts the texts of a pair. Some converters always wrote
add_sep_token = true, which would mean two."""
MAX_SPACED = 0.1
"""Maximum share of a WordPiece vocabulary that begins with sentencepiece's mark of a space."""
LONG_MARK = 3
"""Minimum length of a token such as [X] that older converters left as it was."""


def hub_tokens(tokens: Tokens) -> Tokens:
    """Undoes the converter's changes of a WordPiece vocabulary."""
    texts = [_hub_text(text, kind == CONTROL) for text, kind in zip(tokens.texts, tokens.types.tolist())]
    return replace(tokens, texts=texts, ids=dict(zip(texts, range(len(texts)))))


def _hub_text(text: str, is_control: bool) -> str:
    if text.startswith(SPACE):
        return text[len(SPACE) :]
    if is_control or (len(text) >= LONG_MARK and text[0] + text[-1] == "[]"):
        return text
    return INSIDE + text


def word_pieces(metadata: Metadata, tokens: Tokens, unknown: int | None) -> dict[str, Any]:
    """Returns the normalizer, pre-tokenizer, decoder and model of a WordPiece vocabulary. Raises ValueError without a
    token for unknown words, NotImplementedError for pieces of sentencepiece."""
    if sum(text.startswith(SPACE) for text in tokens.texts) > MAX_SPACED * len(tokens.texts):
        raise NotImplementedError(
            f"{metadata.path} has pieces of sentencepiece as a WordPiece vocabulary, as llama.cpp's converter writes "
            "those of CamemBERT, with wrong positions; use the checkpoint that it was made from"
        )
    unknown = metadata.required("tokenizer.ggml.unknown_token_id", unknown)
    lowercase = metadata.flag("tokenizer.ggml.normalizer.lowercase")
    if lowercase is None:  # older files do not say it; no text could give a token with a capital
        lowercase = not any(_has_capital(text) for text in tokens.texts)
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": metadata.flag("tokenizer.ggml.normalizer.strip_accents"),
        "lowercase": lowercase,
    }
    model = {
        "type": "WordPiece",
        "unk_token": tokens.texts[unknown],
        "continuing_subword_prefix": INSIDE,
        "max_input_chars_per_word": MAX_WORD,
        "vocab": tokens.ids,
    }
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": INSIDE, "cleanup": True},
        "model": model,
    }


def _has_capital(text: str) -> bool:
    return not (text[:1] == "[" and text[-1:] == "]") and text != text.lower()


def unigram(metadata: Metadata, tokens: Tokens, unknown: int | None) -> dict[str, Any]:
    """Returns the normalizer, pre-tokenizer, decoder and model of a vocabulary of pieces with scores. Raises ValueError
    if scores are missing or not finite."""
    key = "tokenizer.ggml.scores"
    scores = metadata.required(key, metadata.numbers(key)).astype(float)
    if len(scores) != len(tokens.texts) or not np.isfinite(scores).all():
        raise ValueError(
            f"{metadata.path}: {key} must have a finite score for each of {len(tokens.texts)} tokens; it has "
            f"{len(scores)}"
        )
    # Fillers have a score so low that it would change that of unknown characters.
    used = tokens.types != UNUSED
    scores = np.maximum(scores, scores[used].min()) if used.any() else scores
    scheme = "always" if metadata.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    words = [{"type": "WhitespaceSplit"}] if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", True) else []
    return {
        "normalizer": _charsmap(metadata),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, spaces]},
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [list(pair) for pair in zip(tokens.texts, scores.tolist())],
            "byte_fallback": False,
        },
    }


def _charsmap(metadata: Metadata) -> dict[str, Any] | None:
    """The table by which sentencepiece normalises characters, or None."""
    key = "tokenizer.ggml.precompiled_charsmap"
    table = metadata.numbers(key)
    if table is None or not len(table):
        return None
    if table.dtype.itemsize != 1:
        raise ValueError(f"{metadata.path}: {key} must be an array of bytes; got {table.dtype}")
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table.tobytes()).decode()}


def encoder_ends(metadata: Metadata, texts: list[str], ids: dict[str, int | None]) -> dict[str, Any] | None:
    """Post-processor of an encoder, which puts tokens around texts and pairs. `ids`: those of "bos", "eos" and
    "seperator". In WordPiece, texts have both ends, also if keys say otherwise, and the second text of a pair has type
    1. Raises ValueError if such a vocabulary lacks one."""

    def token(name: str) -> list[Token]:
        return [] if ids[name] is None else [(texts[ids[name]], ids[name])]

    def added(name: str) -> list[Token]:
        return token(ENDS[name]) if metadata.flag(f"tokenizer.ggml.add_{name}_token", True) else []

    if metadata.text("tokenizer.ggml.model") == WORD_PIECES:
        for name in ("bos", "seperator"):
            metadata.required(f"tokenizer.ggml.{name}_token_id", ids[name])
        return pair_with_ends(token("bos"), token("seperator"), (), second_type=1)
    after = added("eos")
    between = added("sep") if after and metadata.text("tokenizer.ggml.pre") not in ONE_SEPARATOR else []
    return pair_with_ends(added("bos"), after, between)
