"""The files of one model: `Checkpoint` reads each of them once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from pace.checkpoints.digest import VERSION, checkpoint_digest
from pace.checkpoints.files import Version, read_json_object
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.gguf.file import is_gguf
from pace.checkpoints.gguf.projectors.registry import TEXT_ARCHITECTURES
from pace.checkpoints.quantized import Method
from pace.checkpoints.quantized.reader import QuantizedCheckpoint, check_not_quantized
from pace.checkpoints.reader import CheckpointReader
from pace.llm.loading.find import find_mmproj
from pace.llm.loading.repository import QUANTIZATION_FILES, some
from pace.memory import give_back_code, give_back_memory
from pace.tokenizer.loading import load_tokenizer, tokenizer_contents

logger = logging.getLogger("pace")


class Checkpoint:
    """A directory or GGUF file found by `find_checkpoint`. Its files are read on first use."""

    def __init__(self, path: str | Path, media: bool = False, mmproj: str | Path | None = None) -> None:
        """With `media`, a GGUF file has the towers of its mmproj file: of `mmproj`, or of one that is found."""
        self.path = Path(path)
        self._media, self._mmproj = media, mmproj
        self.missing_towers = ""
        """Why a GGUF file has no towers, and what to do; empty for one that has some or never has any. It names no
        folder, since clients may read it."""
        self._loaded: dict[Path, Version] = {}
        """The files of weights, as they were when the weights were opened."""

    @cached_property
    def gguf(self) -> GgufCheckpoint | None:
        """The open GGUF file; None for a directory. Raises ValueError for a directory with an `mmproj`."""
        if not is_gguf(self.path):
            if self._mmproj is not None:
                raise ValueError(
                    f"mmproj={os.fspath(self._mmproj)!r} has the towers of a GGUF file, and {self.path} is not a GGUF "
                    "file; leave mmproj out, as other checkpoints have their towers themselves"
                )
            return None
        checkpoint = GgufCheckpoint(self.path)
        if self._mmproj is not None:
            checkpoint.add_towers(Path(self._mmproj).expanduser())
        elif self._media:
            self.missing_towers = _add_found_towers(checkpoint)
        return checkpoint

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, or the equivalent metadata of a GGUF file. Raises the errors of `read_config_json`."""
        return read_config_json(self.path) if self.gguf is None else self.gguf.config

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json; {} if there is none. A GGUF file adds its tokens that are never generated."""
        return read_generation_config(self.path) | ({} if self.gguf is None else self.gguf.generation_config)

    def load_tokenizer(self, vocab_size: int | None = None, required: bool = True) -> Any:
        """Calls `pace.tokenizer.loading.load_tokenizer` for this checkpoint."""
        return load_tokenizer(self.path, vocab_size, required, None if self.gguf is None else self.gguf.metadata)

    def forget_vocabulary(self) -> None:
        """Frees the vocabulary of a GGUF file after the tokenizer is made: some 50 MB for 262,000 tokens."""
        if self.gguf is not None:
            self.gguf.metadata.forget_lists()
        give_back_memory()
        give_back_code()

    def open_weights(self, method: Method | None) -> CheckpointReader | GgufCheckpoint | QuantizedCheckpoint:
        """Opens the weights; the caller must close them. `method` is the quantisation method of a directory."""
        if self.gguf is not None:
            self._loaded = self.gguf.files
            return self.gguf
        reader = CheckpointReader(self.path)
        self._loaded = reader.files
        if method is None:
            check_not_quantized(reader)
            return reader
        return QuantizedCheckpoint(reader, method)

    def digest(self, tokenizer: Path, workers: int, version: int = VERSION) -> str:
        """Returns the digest of weights, config and tokenizer, which depends only on their contents. `tokenizer` is the
        path of the tokenizer. Reads all weights again. Raises ValueError if their files have changed, and OSError."""
        opened = CheckpointReader(self.path) if self.gguf is None else GgufCheckpoint(self.path)
        with opened:
            if not opened.files.items() <= self._loaded.items():
                raise ValueError(
                    f"the weights in {self.path} have changed since they were loaded; load the model again"
                )
            config = self.config if self.gguf is None else opened.config
            others = {"config": json.dumps(config, sort_keys=True).encode()}
            others |= {f"tokenizer {name}": data for name, data in tokenizer_contents(tokenizer).items()}
            return checkpoint_digest(opened, others, workers, version)

    def mmproj_digest(self) -> str:
        """Returns the digest of the mmproj file with the towers of a GGUF file; empty if there is none. Raises
        OSError."""
        if self.gguf is None or self.gguf.towers.path is None:
            return ""
        with open(self.gguf.towers.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _add_found_towers(checkpoint: GgufCheckpoint) -> str:
    """Adds the towers of the best mmproj file that belongs to a GGUF file. If there are others only, warns. Returns why
    no towers were added, as `Checkpoint.missing_towers`."""
    problems: dict[str, str] = {}
    for path in find_mmproj(checkpoint.path):
        try:
            checkpoint.add_towers(path)
            return ""
        except (ValueError, NotImplementedError, OSError) as error:
            problems[path.name] = str(error)
    name, advice = checkpoint.path.name, "into the same folder, or give its path as mmproj= (--mmproj)"
    if problems:
        logger.warning("this model takes no images or sound: %s", next(iter(problems.values())))
        return f"{', '.join(problems)} does not belong to {name}; put its own mmproj file {advice}"
    if checkpoint.metadata.text("general.architecture") not in TEXT_ARCHITECTURES:
        return ""
    return (
        f"{name} has no tower, and no mmproj file was found; if the model is made for images or sound, put its mmproj "
        f"file, such as mmproj-F16.gguf, {advice}"
    )


@contextmanager
def errors_about(checkpoint: Checkpoint) -> Iterator[None]:
    """Adds the path of a GGUF file, and of its mmproj file, to errors. Those about metadata refer to config.json."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if checkpoint.gguf is None:
            raise
        kind = ValueError if isinstance(error, ValueError) else NotImplementedError
        where = " with ".join(str(path) for path in (checkpoint.path, checkpoint.gguf.towers.path) if path)
        converted = " (its metadata as config.json)" if "config.json" in str(error) else ""
        raise kind(f"{where}{converted}: {error}") from None


def read_config_json(directory: str | Path) -> dict:
    """Reads config.json, with the `quantization_config` that early checkpoints have in a separate file, or the
    equivalent metadata of a GGUF file. Raises FileNotFoundError if it is missing, ValueError if it is not a JSON
    object."""
    if is_gguf(Path(directory)):
        with GgufCheckpoint(directory) as checkpoint:
            return checkpoint.config
    path = Path(directory) / "config.json"
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{directory} has no config.json, so it is not a Hugging Face checkpoint; give the directory that "
            f"holds config.json and "
            f"the weights{_what_is_there(Path(directory))}"
        )
    config = read_json_object(path)
    for name, method in QUANTIZATION_FILES.items():
        beside = path.with_name(name)
        if not (config.get("quantization_config") or config.get("compression_config")) and os.path.lexists(beside):
            config["quantization_config"] = {"quant_method": method, **read_json_object(beside)}
    return config


def _what_is_there(directory: Path) -> str:
    if not directory.is_dir():
        return ""
    names = sorted(entry.name for entry in directory.iterdir())
    if "adapter_config.json" in names:
        return "; it has a LoRA adapter: load the model that this was trained for, and give it as the adapter"
    nested = [name for name in names if (directory / name / "config.json").is_file()]
    return f" (perhaps {nested[0]!r} inside it)" if nested else f" (it has {some(names)})"


def read_generation_config(directory: str | Path) -> dict:
    """Reads generation_config.json; {} if there is none. Raises ValueError if it is not a JSON object."""
    path = Path(directory) / "generation_config.json"
    return read_json_object(path) if os.path.lexists(path) else {}
