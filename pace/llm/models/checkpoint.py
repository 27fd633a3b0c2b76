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
    """A directory or GGUF file that `find_checkpoint` found. What it holds is read when it is first asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def gguf(self) -> GgufCheckpoint | None:
        """The GGUF file, open; None of a directory."""
        return GgufCheckpoint(self.path) if is_gguf(self.path) else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, or what a GGUF file has instead. Raises as `read_config_json`."""
        return read_config_json(self.path) if self.gguf is None else self.gguf.config

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, {} where there is none."""
        return read_generation_config(self.path)

    def load_tokenizer(self, vocab_size: int | None = None, required: bool = True) -> Any:
        """As `pace.tokenizer.loading.load_tokenizer`."""
        return load_tokenizer(self.path, vocab_size, required, None if self.gguf is None else self.gguf.metadata)

    def forget_vocabulary(self) -> None:
        """Frees the vocabulary of a GGUF file, once a tokenizer is made of it: some 50 MB of 262,000 tokens."""
        if self.gguf is not None:
            self.gguf.metadata.forget_lists()
        give_back_memory()

    def open_weights(self, method: Method | None) -> CheckpointReader | GgufCheckpoint | QuantizedCheckpoint:
        """The weights, which a directory holds quantised as `method` says; to be closed by who opens them."""
        if self.gguf is not None:
            return self.gguf
        reader = CheckpointReader(self.path)
        if method is None:
            check_not_quantized(reader)
            return reader
        return QuantizedCheckpoint(reader, method)
