"""Reads one `pytorch_model*.bin`: a pickled dictionary of tensors, as `torch.save` writes it.

A pickle is a program. It is only run by torch's `weights_only` unpickler, which can rebuild tensors and refuses
everything else. The file is mapped into memory, and the tensors are views of it. `torch.load` does this for the zip
format (torch 1.6 and later). It can only read the older format as a whole, so `_load_legacy` maps that."""

from __future__ import annotations

import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import _weights_only_unpickler

from pace import _C
from pace.checkpoints.files import Version, opened, read_at, refuse_git_lfs
from pace.checkpoints.safetensors_file import TensorInfo, copy_in_own_pages

# The pickle only names the tensors (about 200 bytes each); their data is stored separately in the archive.
MAX_PICKLE_BYTES = 64 << 20

LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

ADVICE = "Use the checkpoint's safetensors files, or convert it in an environment that you trust"


class TorchFile:
    """An open file, with the interface of `SafetensorsFile`."""

    def __init__(self, path: Path):
        """Maps the file and rebuilds its tensors.

        Raises FileNotFoundError, PermissionError, or ValueError. ValueError means that the file is damaged, wants to
        run code, or is not a dictionary of dense CPU tensors by name."""
        self.path = path
        with opened(path) as descriptor:
            self.version = Version.of(descriptor)
            start = read_at(descriptor, path, 64)
        refuse_git_lfs(path, start)
        load = _load_legacy
        if start.startswith(b"PK\x03\x04"):
            _check_archive(path)
            load = _load_archive
        self._tensors = _check_entries(path, _unpickle(path, load))
        self.tensors = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}
        self._is_kept = False

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor, counted through all dimensions but the last. The result is read-only.

        Rows are not copied if they are contiguous in the file and aligned for their dtype. Raises ValueError if the
        file is closed."""
        if name not in self._tensors:
            raise ValueError(f"{self.path} has been closed; no tensor can be read from it")
        rows = _rows(self._tensors[name], start, stop)
        return rows if rows.is_contiguous() and rows.data_ptr() % rows.itemsize == 0 else copy_in_own_pages(rows)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of a tensor. They take memory if the tensor is not contiguous in the file."""
        if (tensor := self.read(name)).numel():
            yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        self.release(name)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Drops the mapped pages of rows [start, stop) from this process's memory; a later access reads them again."""
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.numel() and tensor.is_contiguous():
            rows = _rows(tensor, start, stop)
            _C.release_pages(rows.data_ptr(), rows.nbytes)

    def keep(self, name: str) -> None:
        """Makes `close` do nothing, because rows of a tensor are read later, one by one."""
        self._is_kept = True

    def close(self) -> None:
        if not self._is_kept:
            self._tensors = {}


def _rows(tensor: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
    return (tensor.flatten(0, -2) if tensor.dim() > 2 else tensor)[start:stop] if tensor.dim() else tensor


def _check_archive(path: Path) -> None:
    """Raises ValueError unless this is a complete zip archive with uncompressed entries, as torch writes it."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, ValueError, NotImplementedError, MemoryError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); download or copy it again") from None
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ValueError(
                f"{path} holds the compressed entry {entry.filename[:200]!r}, which torch.save never writes. {ADVICE}"
            )
        if entry.header_offset + entry.file_size > size:
            raise ValueError(
                f"{path} is truncated: entry {entry.filename[:200]!r} ends beyond the file; download it again"
            )
        if entry.filename.endswith("data.pkl") and entry.file_size > MAX_PICKLE_BYTES:
            raise ValueError(
                f"{path} holds a pickle of {entry.file_size:,} bytes; at most {MAX_PICKLE_BYTES:,} are allowed"
            )


def _load_archive(path: Path) -> object:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _load_legacy(path: Path) -> object:
    """Returns the same as `torch.load(path, weights_only=True)`, but as views of the mapped file. The file holds

        magic number, protocol version, about the machine: three pickles of plain values

        the dictionary          a pickle that names storages by key, dtype and number of elements

        the keys                a pickle of a list

        for each key            number of elements (int64), elements

    The position of a key's elements depends on the dtypes of the keys before it, which only the dictionary contains. So
    the dictionary is unpickled twice, the first time with storages at wrong positions."""
    size = path.stat().st_size
    mapping = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
    declared: dict[str, tuple[torch.dtype, int]] = {}
    begins: dict[str, int] = {}

    def storage(key: str, dtype: torch.dtype, numel: int) -> torch.TypedStorage:
        if declared.setdefault(key, (dtype, numel * dtype.itemsize)) != (dtype, numel * dtype.itemsize):
            raise ValueError(f"storage {key} has different sizes in different places")
        begin = begins.get(key, 0)
        view = mapping[begin : begin + numel * dtype.itemsize]  # cannot grow: a tensor that exceeds it is an error
        return torch.TypedStorage(wrap_storage=view, dtype=dtype, _internal=True)

    with open(path, "rb") as file:
        if (_next_pickle(file), _next_pickle(file)) != (LEGACY_MAGIC, LEGACY_PROTOCOL):
            raise ValueError("it does not begin like a file of torch.save")
        _next_pickle(file)
        dictionary_start = file.tell()
        _next_pickle(file, storage)
        for key in _next_pickle(file):
            dtype, nbytes = declared[key]
            (numel,) = struct.unpack("<q", file.read(8))
            begins[key] = file.tell()
            if numel * dtype.itemsize != nbytes or begins[key] + nbytes > size:
                raise ValueError(
                    f"it is truncated, or storage {key} lacks some of the {nbytes:,} bytes that its tensors need"
                )
            file.seek(nbytes, os.SEEK_CUR)
        if missing := declared.keys() - begins.keys():
            raise ValueError(f"storage {min(missing)} has no elements")
        file.seek(dictionary_start)
        return _next_pickle(file, storage)


def _next_pickle(
    file: BinaryIO, storage: Callable[[str, torch.dtype, int], torch.TypedStorage] | None = None
) -> object:
    """Reads the next pickle of a file with torch's restricted unpickler.

    `storage(key, dtype, number of elements)` returns the storages it names; None if it may not name any."""
    unpickler = _weights_only_unpickler.Unpickler(file, encoding="utf-8")

    def persistent_load(saved: tuple) -> torch.TypedStorage:
        _, kind, key, _, numel, view = saved
        if view is not None:
            raise ValueError("it holds views of storages, which torch has not written since version 0.4")
        return storage(key, kind.dtype, numel)

    if storage is not None:
        unpickler.persistent_load = persistent_load
    return unpickler.load()


def _unpickle(path: Path, load: Callable[[Path], object]) -> object:
    try:
        return load(path)
    except Exception as error:  # a damaged pickle can raise any exception
        text = str(error)
        wanted = re.search(r"GLOBAL (\S+)", text)
        if wanted:
            raise ValueError(
                f"{path} would run code ({wanted[1][:200]}) while it is read, which is never allowed. {ADVICE}"
            ) from None
        # torch's own advice is to disable the protection. The reason is in the other lines.
        lines = [line for line in text.splitlines() if line.strip() and "weights_only" not in line]
        reason = " ".join(lines)[:300] or type(error).__name__
        raise ValueError(
            f"{path} cannot be read as a torch checkpoint; it is damaged or has another format ({reason})"
        ) from None


def _check_entries(path: Path, content: object) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a dictionary of tensors by name, but holds a {type(content).__name__}. {ADVICE}"
        )
    tensors = {}
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} has an entry whose name is not a string: {str(name)[:200]!r}. {ADVICE}")
        if not isinstance(tensor, torch.Tensor):
            hint = " (a checkpoint of a training run?)" if isinstance(tensor, dict) else ""
            raise ValueError(
                f"entry {name[:200]!r} of {path} is a {type(tensor).__name__}, not a tensor{hint}. {ADVICE}"
            )
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise ValueError(
                f"tensor {name[:200]!r} of {path} is not a plain dense tensor "
                f"(layout {tensor.layout}, device {tensor.device}, quantised: {tensor.is_quantized}). {ADVICE}"
            )
        tensors[name] = tensor.detach()
    return tensors
