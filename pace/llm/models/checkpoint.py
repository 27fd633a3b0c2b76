"""`Checkpoint`: the files of one model, each read once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.gguf.file import is_gguf
from pace.checkpoints.quantized import Method
from pace.checkpoints.quantized.reader import QuantizedCheckpoint, check_not_quantized
from pace.checkpoints.reader import CheckpointReader
from pace.llm.models.hf_utils import read_config_json, read_generation_config
from pace.memory import give_back_memory
from pace.tokenizer.loading import load_tokenizer


class Checkpoint:
    """A directory or GGUF file found by `find_checkpoint`. Its files are read on first use."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def gguf(self) -> GgufCheckpoint | None:
        """The open GGUF file; None for a directory."""
        return GgufCheckpoint(self.path) if is_gguf(self.path) else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, or the equivalent metadata of a GGUF file. Raises the errors of `read_config_json`."""
        return read_config_json(self.path) if self.gguf is None else self.gguf.config

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json; {} if there is none."""
        return read_generation_config(self.path)

    def load_tokenizer(self, vocab_size: int | None = None, required: bool = True) -> Any:
        """Calls `pace.tokenizer.loading.load_tokenizer` for this checkpoint."""
        return load_tokenizer(self.path, vocab_size, required, None if self.gguf is None else self.gguf.metadata)

    def forget_vocabulary(self) -> None:
        """Frees the vocabulary of a GGUF file after the tokenizer is made: some 50 MB for 262,000 tokens."""
        if self.gguf is not None:
            self.gguf.metadata.forget_lists()
        give_back_memory()

    def open_weights(self, method: Method | None) -> CheckpointReader | GgufCheckpoint | QuantizedCheckpoint:
        """Opens the weights; the caller must close them. `method` is the quantisation method of a directory."""
        if self.gguf is not None:
            return self.gguf
        reader = CheckpointReader(self.path)
        if method is None:
            check_not_quantized(reader)
            return reader
        return QuantizedCheckpoint(reader, method)
