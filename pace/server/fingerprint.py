"""`system_fingerprint`: equal fingerprint, body and seed give equal bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pace import _C, __version__
from pace.llm.loading.find import find_checkpoint, find_mmproj
from pace.llm.loading.options import LoadOptions

SAMPLED_BYTES = 64 << 10
"""Bytes read at both ends of each file: different checkpoints also differ in their first and last weights."""
KINDS = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model")


def fingerprint(options: LoadOptions) -> str:
    """Returns a hash of everything except the request that determines the bits of an answer. This includes the version,
    the checkpoint's files, the formats of weights and cache, and the instruction set."""
    held = (options.dtype, options.quantization, options.kv_cache_dtype, options.backend, options.max_seq_len)
    digest = hashlib.sha256(json.dumps([__version__, _C.isa(), *map(repr, held)]).encode())
    checkpoint = _find(options, options.model_name_or_path, revision=options.revision)
    _add_files(digest, checkpoint)
    if options.mmproj is not None:
        _add_files(digest, Path(options.mmproj).expanduser())
    elif options.media and checkpoint.is_file():
        for mmproj in find_mmproj(checkpoint):
            _add_files(digest, mmproj)
    if options.adapter is not None:
        _add_files(digest, Path(options.adapter).expanduser())
    if options.tokenizer_name_or_path not in (None, options.model_name_or_path):
        _add_files(digest, _find(options, options.tokenizer_name_or_path, weights=False))
    return f"fp_{digest.hexdigest()[:16]}"


def _find(options: LoadOptions, where: str | Path, **which: Any) -> Path:
    """Returns the files that were just loaded, without asking the Hub again."""
    return find_checkpoint(
        where, token=options.token, cache_dir=options.cache_dir, local_files_only=True, progress=False, **which
    )


def _add_files(digest: Any, checkpoint: Path) -> None:
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    for file in files:
        if file.suffix in KINDS and file.is_file():
            size = file.stat().st_size
            with open(file, "rb") as stream:
                head = stream.read(SAMPLED_BYTES)
                stream.seek(max(0, size - SAMPLED_BYTES))
                digest.update(f"{file.name} {size} ".encode() + head + stream.read(SAMPLED_BYTES))
