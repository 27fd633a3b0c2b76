"""Tokenizers of InternLM 2 and of InternVL with it. Their checkpoints define them in Python code, which is not needed
here: a sentencepiece vocabulary, and the tokens of tokenizer_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pace.checkpoints.files import read_json_object
from pace.checkpoints.sentencepiece import read_sentencepiece
from pace.checkpoints.vocabulary import (
    CONTROL,
    added_token,
    listed_tokens,
    read_vocabulary,
    settings_of_code,
    text_with_ends,
)
from pace.tokenizer.tokenizer import Tokenizer

VOCABULARY = "tokenizer.model"
"""File of the vocabulary."""

CLASSES = ("InternLM2Tokenizer", "InternLM2TokenizerFast")


def is_own_tokenizer(directory: Path) -> bool:
    """True if a checkpoint defines its tokenizer in code, and this module makes it instead."""
    settings = directory / "tokenizer_config.json"
    if (directory / "tokenizer.json").exists() or not (directory / "tokenizer.model").exists():
        return False
    return settings.exists() and read_json_object(settings).get("tokenizer_class") in CLASSES


def own_tokenizer(directory: Path) -> tuple[dict[str, Any], dict[str, Any], type[Tokenizer]]:
    """Returns the contents of tokenizer.json and of tokenizer_config.json, and the class. Raises ValueError or
    NotImplementedError that name the file."""
    path, config = directory / "tokenizer.model", directory / "tokenizer_config.json"
    model, settings = read_sentencepiece(path, read_vocabulary(path)), read_json_object(config)
    tokens = {index: model.pieces[index] for index, kind in enumerate(model.types) if kind == CONTROL}
    tokens[model.unknown] = model.pieces[model.unknown]
    tokens |= listed_tokens(config, settings)
    beyond = sorted(index for index in tokens if index >= len(model.pieces))
    if beyond != list(range(len(model.pieces), len(model.pieces) + len(beyond))):
        raise ValueError(f"{config}: added_tokens_decoder must have ids from {len(model.pieces)} on without a gap")
    for index, token in tokens.items():
        if index < len(model.pieces):  # tokens may have the place of an unused piece
            model.pieces[index], model.types[index] = token, CONTROL
    ids = {token: index for index, token in tokens.items()}
    begin = settings.get("bos_token") if settings.get("add_bos_token", True) else None
    if begin is not None and begin not in ids:
        raise ValueError(f"{config}: bos_token must be one of its special tokens; got {begin!r}")
    state = {
        "added_tokens": [added_token(index, token) for index, token in sorted(tokens.items())],
        "post_processor": text_with_ends([] if begin is None else [(begin, ids[begin])]),
        **model.parts(),
    }
    return state, settings_of_code(directory, settings), Tokenizer
