"""Reads the weights of a checkpoint directory: its files, its tensors, and their data without copies.

    model.safetensors                 one file
    model.safetensors.index.json      {"weight_map": {tensor name: shard file}} and the shards
    pytorch_model.bin(.index.json)    the same as pickles
    gptq_model-4bit-128g.safetensors  with any numbers, as in early AutoGPTQ

The first that exists is used, in this order. All files are opened and checked before the first tensor is read. An
incomplete checkpoint is therefore refused at once, not after minutes of packing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Self

import torch

from pace.checkpoints.files import Version, file_inside, read_json_object
from pace.checkpoints.mapping import MappedFile
from pace.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from pace.checkpoints.torch_file import TorchFile
from pace.naming import dtype_name

SAFETENSORS_NAME = "model.safetensors"
TORCH_NAME = "pytorch_model.bin"
GPTQ_NAME = "gptq_model-*bit-*g.safetensors"
INDEX_SUFFIX = ".index.json"

# The index of Llama-3.1-405B, the largest checkpoint of the supported families, is 100 KB.
MAX_INDEX_BYTES = 16 << 20

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Weights are read, packed and released in pieces of this size. It bounds the memory of a loading thread in addition to
# the packed weights. Unaligned data must be copied, which doubles this. Pieces larger than the L2 cache cost no speed.
PIECE_BYTES = 4 << 20

# Weight formats that may be in a directory; an error lists them.
OTHER_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack")


class OpenFiles:
    """Open files of weights, and the file of each tensor. As a context manager it closes them."""

    def __init__(self, files: Mapping[str, MappedFile | TorchFile] = {}):
        self._files = dict(files)
        """Tensor name -> file."""

    def add(self, name: str, file: MappedFile | TorchFile, shown: str | None = None) -> None:
        """Adds a tensor; an error shows its name as `shown`."""
        if name in self._files:
            raise ValueError(
                f"tensor {(shown or name)[:200]!r} is in both {self._files[name].path} and {file.path}; "
                "it may be in one file only"
            )
        self._files[name] = file

    @property
    def files(self) -> dict[Path, Version]:
        """The files that hold the tensors, as they were when they were opened."""
        return {file.path: file.version for file in self._files.values()}

    @property
    def distinct(self) -> list[MappedFile | TorchFile]:
        """The open files that hold the tensors, each once."""
        return list(dict.fromkeys(self._files.values()))

    def keep(self, name: str) -> None:
        """Lets rows of a tensor be read after `close`."""
        self._files[name].keep(name)

    def close(self) -> None:
        """Closes the files. Tensors that were read stay valid."""
        for file in set(self._files.values()):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class CheckpointReader(OpenFiles):
    """The tensors of a checkpoint directory. Threads may share one reader.

        with CheckpointReader(directory) as reader:
            for name in reader.tensors:
                for start, stop in reader.row_ranges(name):
                    use(reader.read(name, start, stop))
                    reader.release(name, start, stop)

    `tensors` maps each name to a `TensorInfo(dtype, shape)`. For a quantised checkpoint, `QuantizedCheckpoint` combines
    its tensors into matrices.

    Its constructor raises FileNotFoundError (no directory, no weights, a missing shard), PermissionError, or
    NotImplementedError (a 4-bit dtype). It raises ValueError for anything damaged or contradictory; the message names
    the file."""

    def __init__(self, directory: str | Path):
        super().__init__()
        self.directory = Path(directory)
        open_file, paths, expected = _find_weights(self.directory)
        self.tensors: dict[str, TensorInfo] = {}
        for file in map(open_file, paths):
            for name, info in file.tensors.items():
                self.add(name, file)
                self.tensors[name] = info
        self._check_index(expected)

    def _check_index(self, expected: dict[str, Path]) -> None:
        """Checks that every tensor is in the shard that the index names. Tensors missing from the index are left to the
        model's check that all tensors are used."""
        wrong = []
        for name, path in expected.items():
            found = self._files[name].path if name in self._files else None
            if found != path:
                wrong.append(
                    f"{name[:200]!r} should be in {path.name}, but is {f'in {found.name}' if found else 'missing'}"
                )
        if wrong:
            more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise ValueError(
                f"the index and the shards of {self.directory} contradict each other: {'; '.join(wrong[:10])}{more}"
            )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor (all by default) in its stored dtype: a matrix, or elements of a vector.
        Rows are counted through all dimensions but the last.

        Returns a read-only view of the file if possible. Raises NotImplementedError if the dtype is not a weight dtype,
        and KeyError for a name not in `tensors`."""
        info = self.tensors[name]
        if info.dtype not in WEIGHT_DTYPES:
            raise NotImplementedError(
                f"tensor {name!r} in {self._files[name].path} is stored as {dtype_name(info.dtype)}; weights must be "
                f"{', '.join(map(dtype_name, WEIGHT_DTYPES))}, or quantised as quantization_config in config.json says"
            )
        return self._files[name].read(name, start, stop)

    def read_integers(self, name: str) -> torch.Tensor:
        """Reads a whole tensor of integers as int64. Raises NotImplementedError if it has another dtype."""
        dtype = self.tensors[name].dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise NotImplementedError(
                f"tensor {name!r} in {self._files[name].path} is stored as {dtype_name(dtype)}; it must have integers"
            )
        return self._files[name].read(name).to(torch.int64)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Frees the memory of rows [start, stop). Until then, mapped file pages count as this process's memory."""
        self._files[name].release(name, start, stop)

    def read_stored(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads entries [start, stop) along the first dimension of a tensor of any dtype, with all its dimensions."""
        shape = self.tensors[name].shape
        rows = self._files[name].read(name, *_rows_of(shape, start, stop))
        return rows if len(shape) < 3 else rows.view(len(range(shape[0])[start:stop]), *shape[1:])

    def release_stored(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Frees what `read_stored` returned, as `release` does."""
        self._files[name].release(name, *_rows_of(self.tensors[name].shape, start, stop))

    def row_ranges(self, name: str, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
        """Ranges [start, stop) of rows that cover a tensor, each of about `piece_bytes`; one range for a vector."""
        *lead, columns = self.tensors[name].shape or (1,)
        if not lead or prod(lead) == 0:
            return [(0, 0 if lead else columns)]
        return row_ranges(prod(lead), columns * self.tensors[name].dtype.itemsize, piece_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())


def _rows_of(shape: tuple[int, ...], start: int, stop: int | None) -> tuple[int, int | None]:
    """Converts a range of entries along the first dimension to a range of rows."""
    each = prod(shape[1:-1])
    return start * each, None if stop is None else stop * each


def row_ranges(rows: int, row_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Ranges [start, stop) of about `piece_bytes` that cover `rows` rows of `row_bytes` each."""
    # Multiples of 16 rows, so that one piece fills a whole panel of packed weights.
    step = max(16, piece_bytes // max(1, row_bytes) // 16 * 16)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def shard_names(index_path: Path, directory: Path) -> dict[str, Path]:
    """Reads `weight_map` of an index file: tensor name -> path of its shard. Raises ValueError for names outside
    `directory`."""
    weight_map = read_json_object(index_path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index_path} must have a weight_map that gives the shard of each tensor, but has {str(weight_map)[:200]}"
        )
    # metadata.total_size is not compared: many published checkpoints count tied weights twice or assume another dtype.
    # The shards' own headers prove completeness.
    return {
        name: file_inside(directory, shard, f"the shard of {name[:200]!r} in {index_path}")
        for name, shard in weight_map.items()
    }


def _find_weights(directory: Path) -> tuple[Callable, list[Path], dict[str, Path]]:
    """Returns the class that opens a weight file, the files, and the file of each tensor from the index (empty without
    one)."""
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory} is not a directory; give the directory that holds config.json and the weights"
        )
    present = {path.name for path in directory.iterdir()}
    for name, open_file in ((SAFETENSORS_NAME, SafetensorsFile), (TORCH_NAME, TorchFile)):
        if name in present:
            return open_file, [directory / name], {}
        if name + INDEX_SUFFIX in present:
            expected = shard_names(directory / (name + INDEX_SUFFIX), directory)
            return open_file, list(dict.fromkeys(expected.values())), expected
    if len(found := fnmatch.filter(present, GPTQ_NAME)) == 1:
        return SafetensorsFile, [directory / found[0]], {}
    other = sorted(name for name in present if name.endswith(OTHER_WEIGHT_SUFFIXES))
    found = f"; it has {', '.join(other[:5])}{', ...' if len(other) > 5 else ''}, which cannot be used" if other else ""
    if any(name.startswith(("model-", "pytorch_model-")) for name in other):
        found = f"; it has shards ({other[0]}, ...) but their index file is missing"
    raise FileNotFoundError(
        f"{directory} has no weights{found}. It needs {SAFETENSORS_NAME}, {SAFETENSORS_NAME}{INDEX_SUFFIX} with its "
        f"shards, {TORCH_NAME}, or {TORCH_NAME}{INDEX_SUFFIX} with its shards"
    )
