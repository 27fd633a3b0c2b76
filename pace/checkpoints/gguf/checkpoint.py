"""GGUF files as a checkpoint: metadata as a config.json, and tensors under the Hub's names.

    blk.3.attn_q.weight, Q4_K      ->  model.layers.3.self_attn.q_proj.weight, rows of blocks (`BlockRows`)

The changes of llama.cpp's converter are undone. It permutes the rows of Llama's queries and keys so that rotated pairs
are adjacent. It adds 1 to the norms of Gemma. It turns scalings of the rotary embedding into a factor for each pair,
and logarithms of decay into rates.

Names and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and src/llama-arch.cpp and
convert_hf_to_gguf.py of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.checkpoints.gguf.architectures.forms import AS_IT_IS, Form
from pace.checkpoints.gguf.architectures.registry import ARCHITECTURES, find_architecture
from pace.checkpoints.gguf.blocks import FILE_TYPES, NVFP4
from pace.checkpoints.gguf.config import ROPE_FACTORS, read_config
from pace.checkpoints.gguf.embedding import asks, dense_tensors, read_pooling
from pace.checkpoints.gguf.file import GgufFile, GgufTensor
from pace.checkpoints.gguf.fused import split_queries_keys_values
from pace.checkpoints.gguf.projectors.projector import Towers
from pace.checkpoints.gguf.projectors.registry import ARCHITECTURE as MMPROJ
from pace.checkpoints.gguf.projectors.registry import read_towers
from pace.checkpoints.gguf.shards import check_shards, shard_paths
from pace.checkpoints.gguf.tokens import rename_tokens
from pace.checkpoints.reader import PIECE_BYTES, OpenFiles, row_ranges
from pace.checkpoints.safetensors_file import TensorInfo, copy_in_own_pages
from pace.ops.blocks import BlockRows, BlockType
from pace.ops.weight_layout import QuantizedRows


class GgufCheckpoint(OpenFiles):
    """Tensors and config of a GGUF file. If the file is split into shards, any shard may be given.

    It has the interface of `CheckpointReader`. A tensor in blocks has a `WeightLayout` as dtype, and `read` returns its
    rows as `BlockRows`."""

    def __init__(self, path: str | Path):
        """Raises FileNotFoundError (a shard is missing), PermissionError, ValueError (damaged or contradictory), or
        NotImplementedError (an architecture or a tensor type). The message names the file."""
        super().__init__()
        self.path = Path(path)
        self._sources: dict[str, str] = {}
        """Name here -> name in the file."""
        self.towers = Towers()
        """What an mmproj file has added."""
        files = [GgufFile(shard) for shard in shard_paths(self.path)]
        self.metadata = files[0].metadata
        name = self.metadata.text("general.architecture")
        if name == MMPROJ:
            raise ValueError(
                f"{self.path} is an mmproj file, which has only the towers of a model; give the GGUF file of the "
                "model, and this one as mmproj"
            )
        sources = {source for file in files for source in file.tensors}
        architecture = find_architecture(name, sources | self.metadata.keys())
        if name is not None and architecture is None:
            raise NotImplementedError(
                f"{self.path} has the architecture {name[:80]!r}, which is not implemented; implemented: "
                f"{', '.join(dict.fromkeys(each.name for each in ARCHITECTURES))}"
            )
        check_shards(files)
        self.metadata.required("general.architecture", name)
        split_queries_keys_values(files, architecture)
        self._architecture = architecture
        for file in files:
            for source in file.tensors:
                name = architecture.names.on_hub(source)
                self.add(name, file, source)
                self._sources[name] = source
        self.config = read_config(self.metadata, architecture, self._shapes(), self._factors())
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"} if architecture.permuted else {}
        self._heads = {part: self.config[field] for part, field in heads.items()}
        self.pooling = read_pooling(self.metadata)
        """The pooling that the file states, by its name in sentence-transformers."""
        self.asks = asks(self.config)
        """True if pairs of texts are written into the prompt of Qwen3-Reranker, for a classifier of its answers."""
        self.after_pooling = dense_tensors(self.metadata, self._sources.keys())
        """Matrices `[out, in]` that apply to pooled rows, in order. They are not in `tensors`."""
        self._factors_of = dict(self._scaled())
        """Matrix -> the tensor of its factors."""
        unused = [name for name, source in self._sources.items() if self._is_unused(source)]
        unused += [*self._factors_of.values(), *self._input_scales()]
        self.tensors = {name: self._info(name) for name in self._sources if name not in unused}

    def add_towers(self, mmproj: Path) -> None:
        """Adds the tensors and the config of an mmproj file. Raises the errors of `GgufFile` and `read_towers`, and
        changes nothing then."""
        file = GgufFile(mmproj)
        towers = read_towers(file, self.metadata, self.config)
        if twice := sorted(towers.tensors.keys() & self._sources.keys()):
            raise ValueError(f"tensor {twice[0][:200]!r} is in both {self.path} and {mmproj}")
        for name, tensor in towers.tensors.items():
            self.add(name, file, tensor.sources[0])
            self._sources[name] = tensor.sources[0]
        self.towers, self.config = towers, towers.config
        rename_tokens(self.metadata, towers.renamed)
        self.tensors |= {name: self._info(name) for name in towers.tensors}

    @property
    def generation_config(self) -> dict[str, Any]:
        """Fields of generation_config.json: the tokens that are never generated, if the file names some."""
        tokens = self.metadata.get("tokenizer.ggml.suppress_tokens")
        return {"suppress_tokens": tokens.tolist()} if isinstance(tokens, np.ndarray) else {}

    @property
    def file_type(self) -> str | None:
        """Name of the file's mixture of types, for example "Q4_K_M". None if it is missing or unknown."""
        number = self.metadata.get("general.file_type")
        return FILE_TYPES.get(number) if type(number) is int else None

    def _is_unused(self, source: str) -> bool:
        """True if a tensor is none of the model's."""
        return source in ROPE_FACTORS or source in self.after_pooling or self._is_beyond(source)

    def dense(self, name: str) -> Tensor:
        """Returns a matrix of `after_pooling` in float32, in its own memory."""
        if len(self._tensor(name).shape) != 2:
            raise ValueError(f"{self._shown(name)} must be a matrix; its shape is {list(self._tensor(name).shape)}")
        return self._floats(name).float().clone()

    def _is_beyond(self, source: str) -> bool:
        """True if a tensor belongs to an unused layer for multi-token prediction. These come after the layers of the
        model."""
        found = re.match(r"blk\.(\d+)\.", source)
        if not found or not self.metadata.integer(f"{self.metadata['general.architecture']}.nextn_predict_layers", 0):
            return False
        num_used = self.config["num_hidden_layers"] + ("nextn.eh_proj" in self._architecture.names.inner)
        return int(found[1]) >= num_used

    def _scaled(self) -> Iterator[tuple[str, str]]:
        """Yields the NVFP4 matrices with factors, and the tensors of these: one number for each matrix of a stack.
        Raises ValueError for tensors of other shapes."""
        names = {source: name for name, source in self._sources.items()}
        for name, source in self._sources.items():
            factors = names.get(f"{source.removesuffix('weight')}scale")
            is_matrix = self._kind(name) is NVFP4 and len(self._tensor(name).shape) in (2, 3)
            if not is_matrix or factors is None or not factors.endswith(".scale"):
                continue
            counts, shape = (1, *self._tensor(name).shape[:-2]), self._tensor(factors).shape
            if len(shape) != 1 or shape[0] not in (counts[0], counts[-1]):
                raise ValueError(
                    f"{self._shown(factors)} must have one number for each matrix of {source!r}; its shape is "
                    f"{list(shape)}"
                )
            yield name, factors

    def _input_scales(self) -> Iterator[str]:
        """Yields the scales of inputs that NVFP4 matrices have. They are not used."""
        of_matrices = {
            f"{source.removesuffix('weight')}input_scale"
            for name, source in self._sources.items()
            if self._kind(name) is NVFP4
        }
        yield from (name for name, source in self._sources.items() if source in of_matrices)

    def _kind(self, name: str) -> torch.dtype | BlockType:
        return self._files[name].tensors[self._sources[name]].kind

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self._files[name].tensors[self._sources[name]]
        return tensor._replace(shape=self._form(name).shape(tensor.shape))

    def _shown(self, name: str) -> str:
        """A tensor's name in its file, for messages."""
        return f"tensor {self._sources[name]!r} in {self._files[name].path}"

    def _form(self, name: str) -> Form:
        if name in self.towers.tensors:
            return self.towers.tensors[name].form
        forms = self._architecture.forms.items()
        return next((form for end, form in forms if name.endswith(end)), AS_IT_IS)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._tensor(name).shape for name in self._sources}

    def _factors(self) -> dict[str, list[float]]:
        """Factors of the rotary embedding by tensor name."""
        found = {}
        for name in self._sources.keys() & set(ROPE_FACTORS):
            if len(self._tensor(name).shape) != 1:
                raise ValueError(f"{self._shown(name)} must be a vector; its shape is {list(self._tensor(name).shape)}")
            found[name] = self._floats(name).tolist()
        return found

    def _info(self, name: str) -> TensorInfo:
        tensor = self._tensor(name)
        if self._form(name).values:
            return TensorInfo(torch.float64, tensor.shape)
        if isinstance(tensor.kind, BlockType):
            return TensorInfo(tensor.kind.layout if len(tensor.shape) in (2, 3) else torch.float32, tensor.shape)
        return TensorInfo(tensor.kind, tensor.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor | BlockRows | QuantizedRows:
        """Reads rows [start, stop) of a tensor (all by default), in its stored dtype or as `BlockRows`. Those of a
        matrix with factors are `QuantizedRows`. Rows of a stack of matrices are counted through all of them.

        Returns a read-only view of the file if possible. Raises KeyError for a name not in `tensors`."""
        tensor = self._tensor(name)
        if len(tensor.shape) not in (2, 3) or self._form(name).values:
            whole = self._floats(name)
            if heads := self._permuted_heads(name):
                whole = whole[hub_order(range(whole.shape[0]), whole.shape[0] // heads)]
            whole = whole.flatten(0, -2) if len(tensor.shape) > 3 else whole
            return whole[start:stop] if tensor.shape else whole
        numbers = range(tensor.num_rows)[start:stop]
        raw = self._raw(name, numbers)
        if not isinstance(tensor.kind, BlockType):
            return _as_floats(raw, tensor.kind)
        rows = BlockRows(tensor.kind, raw, self._shown(name))
        return self._multiplied(rows, self._factors_of[name], tensor, numbers) if name in self._factors_of else rows

    def _multiplied(self, rows: BlockRows, factors: str, tensor: GgufTensor, numbers: range) -> QuantizedRows:
        """Multiplies the scales of rows `numbers` of a tensor by the factors of their matrices. Raises ValueError for
        factors that are NaN or infinite."""
        values, unpacked = self._floats(factors).float(), rows.unpack()
        if not values.isfinite().all():
            raise ValueError(f"{self._shown(factors)} has NaN or infinite numbers: the file is damaged")
        of_rows = values[torch.arange(numbers.start, numbers.stop) // max(1, tensor.num_rows // len(values))]
        return replace(unpacked, scales=unpacked.scales * of_rows[:, None])

    def _raw(self, name: str, rows: range) -> Tensor:
        """Stored bytes of a matrix's rows, in the Hub's order."""
        file, source = self._files[name], self._sources[name]
        if not (heads := self._permuted_heads(name)):
            return file.rows(source, rows.start, rows.stop)
        head_dim = file.tensors[source].num_rows // heads
        first = rows.start // head_dim * head_dim
        return file.rows(source, first, -(-rows.stop // head_dim) * head_dim)[hub_order(rows, head_dim) - first]

    def _floats(self, name: str) -> Tensor:
        """The whole tensor as floats."""
        file, tower = self._files[name], self.towers.tensors.get(name)
        parts = [self._values(file, source) for source in (tower.sources if tower else [self._sources[name]])]
        whole, values = parts[0] if len(parts) == 1 else torch.stack(parts), self._form(name).values
        return (values(whole.double()) if values else whole).reshape(self._tensor(name).shape)

    def _values(self, file: GgufFile, source: str) -> Tensor:
        kind, shape = file.tensors[source].kind, file.tensors[source].shape
        rows = file.rows(source)
        values = BlockRows(kind, rows).dequantize() if isinstance(kind, BlockType) else _as_floats(rows, kind)
        return values.reshape(shape)

    def _permuted_heads(self, name: str) -> int | None:
        """Number of heads if the tensor's rows are permuted, else None. Raises ValueError if its rows are not whole
        heads."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        tower = self.towers.tensors.get(name)
        heads = tower.heads if tower else self._heads.get(part)
        if heads and (rows := self._tensor(name).shape[:1]) and rows[0] % (2 * heads):
            raise ValueError(
                f"{self._shown(name)} has {rows[0]} rows; {heads} heads need a multiple of {2 * heads} rows"
            )
        return heads

    def read_integers(self, name: str) -> Tensor:
        """Reads a whole tensor of integers as int64. Raises NotImplementedError if it has another type."""
        if self._tensor(name).kind != torch.int64:
            raise NotImplementedError(f"{self._shown(name)} must have integers of 64 bits (I64)")
        return self._floats(name).long()

    def column_order(self, name: str) -> None:
        """Returns None: no GGUF type reorders its columns."""

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Frees the memory of rows [start, stop). Until then, mapped file pages count as this process's memory."""
        self._files[name].release(self._sources[name], start, stop)

    def keep(self, name: str) -> None:
        self._files[name].keep(self._sources[name])

    def row_ranges(self, name: str, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
        """Ranges [start, stop) of rows that cover a tensor, each of about `piece_bytes`; one range for a vector."""
        tensor, shape = self._tensor(name), self.tensors[name].shape
        if len(shape) < 2 or shape[0] == 0:
            return [(0, shape[0] if shape else 1)]
        return row_ranges(tensor.num_rows, tensor.row_bytes, piece_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(self._tensor(name).nbytes for name in self.tensors)


def _as_floats(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Views the bytes of rows as numbers."""
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else copy_in_own_pages(raw)).view(dtype)


def hub_order(rows: range, head_dim: int) -> Tensor:
    """Maps `rows` of the Hub's query or key matrix to row numbers (int64) of llama.cpp's matrix. Element j of half h of
    a head becomes the head's element 2 j + h."""
    index = torch.arange(rows.start, rows.stop)
    head, element = index // head_dim * head_dim, index % head_dim
    return head + 2 * (element % (head_dim // 2)) + element // (head_dim // 2)
