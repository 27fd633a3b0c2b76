"""Reading one `pytorch_model*.bin`: a pickled dictionary of tensors, as `torch.save` writes it.

A pickle is a program. It is only ever run by torch's `weights_only` unpickler, which knows how to rebuild tensors and
refuses everything else. The zip format (torch 1.6 and later) is mapped into memory; the older format cannot be, and is
loaded whole.
"""

from __future__ import annotations

import os
import re
import threading
import zipfile
from collections import Counter
from pathlib import Path

import torch

from pace import _C
from pace.llm.models.files import git_lfs_message, is_git_lfs_pointer, open_regular, read_at
from pace.llm.models.safetensors_file import TensorInfo

# The pickle only names the tensors (about 200 bytes each); their data lies beside it in the archive.
MAX_PICKLE_BYTES = 64 << 20

ADVICE = "Use the checkpoint's safetensors files, or convert it in an environment that you trust"


class TorchFile:
    """One open file, with the interface of `SafetensorsFile`."""

    def __init__(self, path: Path):
        """Maps the file and rebuilds its tensors.

        Raises FileNotFoundError, PermissionError, or ValueError: damaged, wants to run code, or holds other things than
        dense CPU tensors by name.
        """
        self.path = path
        descriptor = open_regular(path)
        try:
            start = read_at(descriptor, path, 64)
        finally:
            os.close(descriptor)
        if is_git_lfs_pointer(start):
            raise ValueError(git_lfs_message(path))
        self.is_mapped = start.startswith(b"PK\x03\x04")
        if self.is_mapped:
            _check_archive(path)
        self._tensors = self._load()
        self.tensors = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}
        self._lock = threading.Lock()
        self._released_rows = Counter()  # of an unmapped file

    def _load(self) -> dict[str, torch.Tensor]:
        return _check_entries(self.path, _unpickle(self.path, self.is_mapped))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor along its first dimension, without a copy where the file has them contiguous."""
        with self._lock:
            if name not in self._tensors:  # released and wanted again, or closed
                self._tensors[name] = self._load()[name]
            tensor = self._tensors[name]
        return (tensor[start:stop] if tensor.dim() else tensor).contiguous()

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Gives back the memory of rows [start, stop). An unmapped tensor is given back once all its rows are."""
        with self._lock:
            tensor = self._tensors.get(name)
            if tensor is None or tensor.numel() == 0:
                return
            rows = tensor[start:stop] if tensor.dim() else tensor.reshape(1)
            if not self.is_mapped:
                self._released_rows[name] += len(rows)
                if self._released_rows[name] >= (len(tensor) if tensor.dim() else 1):
                    del self._tensors[name], self._released_rows[name]
            elif tensor.is_contiguous():
                _C.release_pages(rows.data_ptr(), rows.nbytes)

    def close(self) -> None:
        self._tensors = {}


def _check_archive(path: Path) -> None:
    """ValueError unless this is a complete zip archive whose entries are stored as they are, as torch writes them."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, ValueError, NotImplementedError, MemoryError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); download or copy it again") from None
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ValueError(f"{path} holds the compressed entry {entry.filename[:200]!r}, which torch.save never writes. {ADVICE}")
        if entry.header_offset + entry.file_size > size:
            raise ValueError(f"{path} is truncated: entry {entry.filename[:200]!r} ends beyond the file; download it again")
        if entry.filename.endswith("data.pkl") and entry.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"{path} holds a pickle of {entry.file_size:,} bytes; at most {MAX_PICKLE_BYTES:,} are allowed")


def _unpickle(path: Path, is_mapped: bool) -> object:
    try:
        return torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)
    except Exception as error:  # a damaged pickle can fail in any way that Python has
        text = str(error)
        wanted = re.search(r"GLOBAL (\S+)", text)
        if wanted:
            raise ValueError(
                f"{path} wants to run code while it is read ({wanted[1][:200]}), which is never allowed. {ADVICE}"
            ) from None
        # torch's own advice is to switch the protection off; the reason stands in the lines that do not say so.
        lines = [line for line in text.splitlines() if line.strip() and "weights_only" not in line]
        reason = " ".join(lines)[:300] or type(error).__name__
        raise ValueError(f"{path} cannot be read as a torch checkpoint; it is damaged or of another kind ({reason})") from None


def _check_entries(path: Path, content: object) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary of tensors by name, but holds a {type(content).__name__}. {ADVICE}")
    tensors = {}
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} has an entry with the name {str(name)[:200]!r}, which is not a string. {ADVICE}")
        if not isinstance(tensor, torch.Tensor):
            hint = " (a checkpoint of a training run?)" if isinstance(tensor, dict) else ""
            raise ValueError(f"entry {name[:200]!r} of {path} is a {type(tensor).__name__}, not a tensor{hint}. {ADVICE}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise ValueError(
                f"tensor {name[:200]!r} of {path} is not a plain dense tensor "
                f"(layout {tensor.layout}, device {tensor.device}, quantised: {tensor.is_quantized}). {ADVICE}"
            )
        tensors[name] = tensor.detach()
    return tensors
