"""The digest of a checkpoint's contents: its tensors, and other data. It does not depend on names or times of files, or
on how tensors are split into files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from pace.checkpoints.mapping import MappedFile
from pace.checkpoints.reader import OpenFiles
from pace.checkpoints.torch_file import TorchFile

DIGEST_BYTES = 32


def checkpoint_digest(files: OpenFiles, others: Mapping[str, bytes], workers: int) -> str:
    """Returns the digest, in hexadecimal. `others` are the contents of the rest, such as the config, by name. Reads all
    tensors, with `workers` threads."""
    tensors = [(file, name) for file in files.distinct for name in file.tensors]
    with ThreadPoolExecutor(workers) as pool:
        lines = [*pool.map(_describe, tensors)]
    lines += [f"{name} {_digest([data])}" for name, data in others.items()]
    return _digest(line.encode() + b"\n" for line in sorted(lines))


def _describe(tensor: tuple[MappedFile | TorchFile, str]) -> str:
    """Describes a tensor completely, in a line."""
    file, name = tensor
    dtype, shape = file.tensors[name][:2]
    return f"tensor {name!r} {getattr(dtype, 'name', dtype)} {list(shape)} {_digest(file.pieces(name))}"


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
