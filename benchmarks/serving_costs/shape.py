"""A known shape as a GGUF file that both servers read, with random weights and the tokenizer of the bundled model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.comparison.checkpoint import ensure_checkpoint
from benchmarks.comparison.gguf_writer import write_gguf
from pace.assets import TINY


def ensure_gguf(shape: str, folder: Path) -> Path:
    """Returns the file of `shape` in q8_0 below `folder`, and writes it the first time."""
    target = folder / shape / f"{shape}-q8_0.gguf"
    if not target.exists():
        partial = target.with_suffix(".partial")
        write_gguf(ensure_checkpoint(shape, folder / shape), partial, "q8_0", TINY)
        partial.rename(target)
    return target
