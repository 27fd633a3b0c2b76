"""Tokenizers of Kimi and Moonlight. Their checkpoints define them in Python code, which is not needed here: a tiktoken
vocabulary, and the tokens of tokenizer_config.json. Ids between these are reserved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pace.checkpoints.files import read_json_object
from pace.checkpoints.gguf.tokenizer import KIMI_PATTERN
from pace.checkpoints.tiktoken import read_tiktoken
from pace.checkpoints.vocabulary import added_token, listed_tokens, read_vocabulary, settings_of_code
from pace.tokenizer.tokenizer import Tokenizer

VOCABULARY = "tiktoken.model"
"""File of the vocabulary."""

CLASS = "TikTokenTokenizer"
MAX_RESERVED = 4096
"""Maximum number of ids after the vocabulary. The published checkpoints have 256."""


def is_own_tokenizer(directory: Path) -> bool:
    """True if a checkpoint defines its tokenizer in code, and this module makes it instead."""
    settings = directory / "tokenizer_config.json"
    if (directory / "tokenizer.json").exists() or not (directory / VOCABULARY).exists():
        return False
    return settings.exists() and read_json_object(settings).get("tokenizer_class") == CLASS


def own_tokenizer(directory: Path) -> tuple[dict[str, Any], dict[str, Any], type[Tokenizer]]:
    """Returns the contents of tokenizer.json and of tokenizer_config.json, and the class. Raises ValueError that names
    the file."""
    path, config = directory / VOCABULARY, directory / "tokenizer_config.json"
    settings, parts = read_json_object(config), read_tiktoken(path, read_vocabulary(path), KIMI_PATTERN)
    listed, first = listed_tokens(config, settings), len(parts["model"]["vocab"])
    if not all(first <= index < first + MAX_RESERVED for index in listed):
        raise ValueError(
            f"{config}: added_tokens_decoder must have ids from {first} to {first + MAX_RESERVED - 1}, after those of "
            f"{path.name}; got {min(listed)} to {max(listed)}"
        )
    ids = range(first, max(listed, default=0) + 1)
    names = {index: listed.get(index, f"<|reserved_token_{index}|>") for index in ids}
    state = {
        "added_tokens": [added_token(index, name) for index, name in names.items()],
        "post_processor": None,
        **parts,
    }
    return state, settings_of_code(directory, settings), Tokenizer
