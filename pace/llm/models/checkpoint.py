"""Reading the weights of a checkpoint directory: which files, which tensors, and their data without copies.

    model.safetensors                 one file, or
    model.safetensors.index.json      {"weight_map": {tensor name: shard file}} and the shards, or
    pytorch_model.bin(.index.json)    the same as pickles

The first that exists is taken, in this order. Everything is opened and checked before the first tensor is read, so a
checkpoint that is incomplete is refused at once and not after minutes of packing.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from pace.llm.models.files import file_inside, read_json_object
from pace.llm.models.safetensors_file import SafetensorsFile, TensorInfo
from pace.llm.models.torch_file import TorchFile

SAFETENSORS_NAME = "model.safetensors"
TORCH_NAME = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"

# The index of Llama-3.1-405B, the largest checkpoint of the supported families, has 100 KB.
MAX_INDEX_BYTES = 16 << 20

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Weights are read, packed and released in pieces of this size. It bounds what a loading thread holds besides the packed
# weights; pieces far above the L2 cache cost no speed.
PIECE_BYTES = 16 << 20

# Weight formats that a user may have at hand and wonder about.
OTHER_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack")


class CheckpointReader:
    """The tensors of a checkpoint directory. Threads may share one reader.

        with CheckpointReader(directory, load_dtype=torch.bfloat16) as reader:
            for name in reader.tensors:
                for start, stop in reader.row_ranges(name):
                    use(reader.read(name, start, stop))
                    reader.release(name, start, stop)

    `tensors` maps each name to a `TensorInfo(dtype, shape, file)`. `load_dtype` is what the weights will be stored as:
    values that it cannot hold are an error when they are read.

    Raises, when it is made: FileNotFoundError (no directory, no weights, a missing shard), PermissionError,
    ValueError (anything damaged or contradictory; the message names the file), NotImplementedError (a 4-bit dtype).
    """

    def __init__(self, directory: str | Path, load_dtype: torch.dtype | None = None):
        self.directory = Path(directory)
        self.load_dtype = load_dtype
        name, expected = _find_weights(self.directory)
        open_file = SafetensorsFile if name == SAFETENSORS_NAME else TorchFile
        self._files = {path: open_file(path) for path in dict.fromkeys(expected.values())} if expected else {}
        if not expected:
            path = self.directory / name
            self._files = {path: open_file(path)}
        self.tensors: dict[str, TensorInfo] = {}
        for file in self._files.values():
            for name, info in file.tensors.items():
                self._add(name, info)
        _check_index(self.directory, expected, self.tensors)

    def _add(self, name: str, info: TensorInfo) -> None:
        if name in self.tensors:
            raise ValueError(f"tensor {name[:200]!r} is in both {self.tensors[name].file} and {info.file}; it may be in one file only")
        self.tensors[name] = info

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor along its first dimension (all of them by default), in its stored dtype.

        A view of the file where possible: not to be written to. Raises NotImplementedError for a dtype that is not a
        weight's, ValueError for values beyond the range of `load_dtype`, KeyError for a name not in `tensors`.
        """
        info = self.tensors[name]
        if info.dtype not in WEIGHT_DTYPES:
            raise NotImplementedError(
                f"tensor {name!r} in {info.file} is stored as {_dtype_name(info.dtype)}; weights must be float32, float16 or "
                "bfloat16. If this is a quantised checkpoint, use the original one"
            )
        tensor = self._files[info.file].read(name, start, stop)
        if self.load_dtype == torch.float16 and info.dtype != torch.float16:
            _check_fits_float16(tensor, name, info.file)
        return tensor

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Gives the memory of rows [start, stop) back. Mapped file pages count as this process's memory until then."""
        self._files[self.tensors[name].file].release(name, start, stop)

    def row_ranges(self, name: str, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
        """Ranges [start, stop) of rows that cover a tensor, each of about `piece_bytes`; one range for a vector."""
        shape = self.tensors[name].shape
        if len(shape) < 2 or shape[0] == 0:
            return [(0, shape[0] if shape else 1)]
        row_bytes = max(1, prod(shape[1:]) * self.tensors[name].dtype.itemsize)
        # Multiples of 16 rows: a panel of packed weights is filled by one piece.
        rows = max(16, piece_bytes // row_bytes // 16 * 16)
        return [(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]

    @property
    def total_bytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def close(self) -> None:
        """Ends reading. Tensors that were read stay valid."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def shard_names(index_path: Path, directory: Path) -> dict[str, Path]:
    """`weight_map` of an index file: the path of the shard of each tensor; ValueError for anything but names inside `directory`."""
    weight_map = read_json_object(index_path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path} must have a weight_map that gives the shard of each tensor, but has {str(weight_map)[:200]}")
    # metadata.total_size is not compared: many published checkpoints count tied weights twice or another dtype there.
    # What must be complete is proved from the shards' own headers.
    return {
        name: file_inside(directory, shard, f"the shard of {name[:200]!r} in {index_path}") for name, shard in weight_map.items()
    }


def _find_weights(directory: Path) -> tuple[str, dict[str, Path]]:
    """Which of the two formats, and the shard of each tensor by the index (empty for a single file)."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory; give the directory that holds config.json and the weights")
    present = {path.name for path in directory.iterdir()}
    for name in (SAFETENSORS_NAME, TORCH_NAME):
        if name in present:
            return name, {}
        if name + INDEX_SUFFIX in present:
            return name, shard_names(directory / (name + INDEX_SUFFIX), directory)
    other = sorted(name for name in present if name.endswith(OTHER_WEIGHT_SUFFIXES))
    found = f"; it has {', '.join(other[:5])}{', ...' if len(other) > 5 else ''}, which cannot be used" if other else ""
    if any(name.startswith(("model-", "pytorch_model-")) for name in other):
        found = f"; it has shards ({other[0]}, ...) but their index file is missing"
    raise FileNotFoundError(
        f"{directory} has no weights{found}. Needed: {SAFETENSORS_NAME}, {SAFETENSORS_NAME}{INDEX_SUFFIX} with its shards, "
        f"{TORCH_NAME}, or {TORCH_NAME}{INDEX_SUFFIX} with its shards"
    )


def _check_index(directory: Path, expected: dict[str, Path], tensors: dict[str, TensorInfo]) -> None:
    """Every tensor is in the shard that the index names. Tensors that the index omits are judged by the model's coverage."""
    wrong = [
        f"{name[:200]!r} should be in {path.name}, but " + (f"is in {tensors[name].file.name}" if name in tensors else "is missing")
        for name, path in expected.items()
        if name not in tensors or tensors[name].file != path
    ]
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(f"the index and the shards of {directory} contradict each other: {'; '.join(wrong[:10])}{more}")


def _check_fits_float16(tensor: torch.Tensor, name: str, file: Path) -> None:
    """ValueError if a finite value is beyond what float16 can hold. Infinities and NaN of the checkpoint stay what they are."""
    limit = torch.finfo(torch.float16).max
    if tensor.numel() == 0:
        return
    low, high = (float(value) for value in torch.aminmax(tensor))
    if -limit <= low and high <= limit:
        return
    finite = tensor[tensor.isfinite()].float().abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if largest > limit:
        raise ValueError(
            f"tensor {name!r} in {file} has the value {largest:g}, beyond float16's {limit:g}; load it with dtype 'bfloat16' or 'float32'"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
