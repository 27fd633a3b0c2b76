"""Loads the tokenizer of a checkpoint: `load_tokenizer`. This is the only module that imports transformers, and only if
it is needed. Code in a checkpoint is never run."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from pace.checkpoints.files import MAX_CONFIG_BYTES, open_regular, read_json_object
from pace.checkpoints.gguf.file import GgufFile, Metadata, is_gguf
from pace.checkpoints.gguf.tokenizer import tokenizer_settings, tokenizer_state
from pace.naming import one_line, shown
from pace.tokenizer import chatglm, internlm2, kimi
from pace.tokenizer.backend import make_backend
from pace.tokenizer.conversations import read_conversation
from pace.tokenizer.pipelines import complete_settings
from pace.tokenizer.template_file import read_template_file
from pace.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("pace")

VOCABULARY_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "tiktoken.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
LARGE_FILES = ("tokenizer.json", "vocab.json")
"""Large files, which are read only by their library."""
MIN_IDS = 0.9
"""Minimum share of a model's vocabulary that its tokenizer must have. Vocabularies are padded by a few percent. If more
is missing, the tokenizer is probably another model's."""


class Source(NamedTuple):
    """Source of a tokenizer."""

    make: Callable[[], Any]
    files: str
    """Description of its files, for messages."""


def load_tokenizer(
    path: str | Path, vocab_size: int | None = None, required: bool = True, metadata: Metadata | None = None
) -> Any:
    """Loads the tokenizer of a checkpoint directory or GGUF file.

    Returns a `Tokenizer`, or one of transformers if its class does more than its files describe. Returns None without
    tokenizer files if `required` is False.

    `vocab_size`: the model's. A tokenizer with more ids is loaded with a warning, because such checkpoints exist (a
    padding token was added without resizing the model). Prompts that use such an id are refused later. A tokenizer with
    less than `MIN_IDS` of the ids is also loaded with a warning.
    `metadata`: the GGUF file's, if it was already read.

    Raises FileNotFoundError (no files, or not those that its class needs) or PermissionError. Raises ValueError if a
    file is damaged, or if only code in the checkpoint defines the class. Raises ImportError if transformers or a
    library it needs is not installed."""
    path = Path(path)
    source = _of_gguf(path, metadata) if is_gguf(path) else _of_directory(path)
    if source.make is None:
        if not required:
            return None
        raise FileNotFoundError(
            f"{path} has no tokenizer ({source.files}); give tokenizer_name_or_path, or token ids instead of text"
        )
    try:
        tokenizer = source.make()
        num_ids = len(tokenizer)
    except ImportError:
        raise
    except BaseException as error:
        # On some damaged files the tokenizers library panics with an exception that is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"pace cannot make the tokenizer in {path} from {source.files}: {one_line(error)}") from error
    _check_size(path, num_ids, vocab_size)
    return tokenizer


def tokenizer_contents(path: str | Path, metadata: Metadata | None = None) -> dict[str, bytes]:
    """Returns the contents of the tokenizer of a directory by file, or of a GGUF file by key. `metadata` is the GGUF
    file's, complete. Raises OSError if a file cannot be read."""
    path = Path(path)
    if is_gguf(path):
        metadata = GgufFile(path).metadata if metadata is None else metadata
        found = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        return {key: json.dumps(value, default=lambda array: array.tolist()).encode() for key, value in found.items()}
    present = {file for pattern in TOKENIZER_FILES for file in path.glob(pattern)}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(present)}


def _check_size(path: Path, num_ids: int, vocab_size: int | None) -> None:
    if vocab_size is not None and num_ids > vocab_size:
        text = "the tokenizer in %s has %d ids, the model only %d; the rest cannot be used"
        logger.warning(text, path, num_ids, vocab_size)
    elif vocab_size is not None and num_ids < MIN_IDS * vocab_size:
        text = "the tokenizer in %s has only %d ids, the model %d: it may be another model's, and give wrong texts"
        logger.warning(text, path, num_ids, vocab_size)


# ---- GGUF files


def _of_gguf(path: Path, metadata: Metadata | None) -> Source:
    metadata = GgufFile(path).metadata if metadata is None else metadata
    state = tokenizer_state(metadata)
    if state is None:
        return Source(None, "no tokenizer.ggml.model in its metadata")
    if metadata.text("tokenizer.ggml.pre") == "chatglm-spm" and not isinstance(state, str):
        return Source(lambda: _make(path, *chatglm.gguf_tokenizer(path, state)), "its metadata")
    return Source(lambda: _make(path, state, tokenizer_settings(metadata)), "its metadata")


def _make(path: Path, state: Any, settings: dict[str, Any], kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    """Makes a tokenizer from the contents of tokenizer.json and tokenizer_config.json."""
    backend = make_backend(state)
    return kind(backend, settings, str(path), partial(_wrapped, backend, settings))


def _wrapped(backend: Backend, settings: dict[str, Any]) -> Any:
    """transformers' tokenizer around a copy of `backend`."""
    from transformers import PreTrainedTokenizerFast

    # No path is given: with a path and more than 100,000 tokens, transformers asks the Hub about it.
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


# ---- Directories


def _of_directory(directory: Path) -> Source:
    present = [path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)]
    if not any(path.name in VOCABULARY_FILES for path in present):
        return Source(None, ", ".join(VOCABULARY_FILES))
    _check_library(directory)
    if (own := _own(directory)) is not None:
        return Source(lambda: _make(directory, *own.own_tokenizer(directory)), own.VOCABULARY)
    settings: dict[str, Any] = {}
    for path in present:
        os.close(open_regular(path))
        if path.suffix == ".json" and path.name not in LARGE_FILES:
            found = read_json_object(path, MAX_CONFIG_BYTES)
            if path.name == "tokenizer_config.json":
                settings = found
                _check_class(path, settings.get("tokenizer_class"))
    files = f"its files ({', '.join(sorted(path.name for path in present))}, and config.json)"
    return Source(lambda: _whole(directory, settings) or _auto(directory, settings), files)


def _own(directory: Path) -> ModuleType | None:
    """The module that makes a tokenizer that a checkpoint defines in code; None for others."""
    return next((module for module in (chatglm, internlm2, kimi) if module.is_own_tokenizer(directory)), None)


def _check_library(directory: Path) -> None:
    """Raises ImportError if transformers needs a missing library to read the vocabulary. transformers' own error would
    name a different library."""
    path = directory / "tokenizer.model"
    if (directory / "tokenizer.json").exists() or not path.is_file() or _own(directory) is not None:
        return
    with open(path, "rb") as file:
        is_tiktoken = file.read(1) != b"\n"  # a protocol buffer message begins with its first piece
    library = "tiktoken" if is_tiktoken else "sentencepiece"
    if importlib.util.find_spec(library) is None:
        raise ImportError(
            f"{path} is a vocabulary of {library}, and transformers needs that package: pip install {library}; or give "
            "tokenizer_name_or_path, a checkpoint with a tokenizer.json"
        )


def _whole(directory: Path, settings: dict[str, Any]) -> Tokenizer | None:
    """A tokenizer that tokenizer.json describes completely. None if the file does not, or is missing."""
    path, config = directory / "tokenizer.json", directory / "config.json"
    if not (settings and path.is_file()):
        return None
    model_type = read_json_object(config).get("model_type") if config.is_file() else ""
    backend = Backend.from_file(str(path))
    complete = complete_settings(backend, _with_older_files(directory, settings), model_type)
    if complete is None:
        return None
    complete["chat_template"] = _chat_templates(directory, settings)
    return Tokenizer(backend, complete, str(directory), partial(_auto, directory, settings))


def _with_older_files(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings, with special and added tokens from the separate files of older checkpoints."""
    if "added_tokens_decoder" in settings:
        return settings
    special, added = directory / "special_tokens_map.json", directory / "added_tokens.json"
    found = read_json_object(special) if special.is_file() else {}
    if settings.get("extra_special_tokens") or settings.get("additional_special_tokens"):
        found.pop("additional_special_tokens", None)
    found = settings | found
    if added.is_file():
        found["added_tokens_decoder"] = {index: {"content": token} for token, index in read_json_object(added).items()}
    return found


def _chat_templates(directory: Path, settings: dict[str, Any]) -> Any:
    """Chat templates. Separate files take precedence over the settings."""
    found = {}
    if (path := directory / "chat_template.jinja").is_file():
        found["default"] = path.read_text(encoding="utf-8")
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if found:
        return found if list(found) != ["default"] else found["default"]
    return settings.get("chat_template") or read_template_file(directory) or read_conversation(directory)


def _auto(directory: Path, settings: dict[str, Any]) -> Any:
    """transformers' tokenizer of a directory."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(directory), config=_config(directory, settings), trust_remote_code=False, local_files_only=True
    )
    # transformers' warning about texts longer than model_max_length goes to stderr; the engine refuses such texts
    # anyway.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if tokenizer.chat_template is None:
        tokenizer.chat_template = read_template_file(directory) or read_conversation(directory)
    return tokenizer


def _config(directory: Path, settings: dict[str, Any]) -> Any:
    """A minimal config for AutoTokenizer, if tokenizer_config.json names the tokenizer's class. AutoTokenizer then
    does not import the model's config class, which would import torch for a second. None lets AutoTokenizer find the
    config."""
    if not settings or not os.path.lexists(directory / "config.json"):
        return None
    config = read_json_object(directory / "config.json")
    model_type = config.get("model_type")
    if "auto_map" in settings or not isinstance(settings.get("tokenizer_class"), str):
        return None
    if not isinstance(model_type, str):
        return None
    from transformers import PretrainedConfig

    names = {name: config[name] for name in ("model_name",) if name in config}
    made = PretrainedConfig(name_or_path=str(directory), **names)
    made.model_type = model_type
    return made


def _check_class(path: Path, name: object) -> None:
    """Raises ValueError if transformers has another class with this name, such as a model, which it would create
    instead of a tokenizer."""
    if not isinstance(name, str) or "Tokenizer" in name:
        return
    import transformers

    found = getattr(transformers, name, None)
    if found is not None and not (isinstance(found, type) and hasattr(found, "convert_ids_to_tokens")):
        raise ValueError(f"{path}: tokenizer_class must name a tokenizer; got {shown(name)}")
