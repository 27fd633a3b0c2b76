"""A known shape as a GGUF file with random weights and the tokenizer of the bundled model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.comparison.checkpoint import ensure_checkpoint
from benchmarks.comparison.gguf_writer import write_gguf
from pace.assets import TINY


def ensure_gguf(shape: str, folder: Path, dtype: str = "q8_0") -> Path:
    """Returns the file of `shape` below `folder`, and writes it the first time. `dtype`: one that `write_gguf`
    writes."""
    target = folder / shape / f"{shape}-{dtype}.gguf"
    if not target.exists():
        partial = target.with_suffix(".partial")
        write_gguf(ensure_checkpoint(shape, folder / shape), partial, dtype, TINY)
        partial.rename(target)
    return target
