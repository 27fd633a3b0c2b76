"""Tensors that `convert_hf_to_gguf.py --fuse-qkv` has joined: the queries, keys and values of a layer.

blk.3.attn_qkv.weight [q + k + v, K]  ->  blk.3.attn_q.weight [q, K], blk.3.attn_k.weight [k, K], ..."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from pace.checkpoints.gguf.architectures.architecture import Architecture, Keys
from pace.checkpoints.gguf.file import GgufFile, GgufTensor

FUSED = re.compile(r"blk\.(\d{1,9})\.attn_qkv\.(weight|bias)")
OF_STATES = "linear_attn.in_proj_qkv"
"""What the name also means in layers of the delta rule, which have no keys and values."""


def split_queries_keys_values(files: Sequence[GgufFile], architecture: Architecture) -> None:
    """Replaces the fused tensors of an architecture that has them separately by ranges of their rows. Raises ValueError
    for tensors with too few rows, or without numbers of heads."""
    names = architecture.names.inner
    if "attn_q" not in names or names.get("attn_qkv") not in (None, OF_STATES):
        return
    keys = Keys(files[0].metadata, {})
    with_state = {name for file in files for name in file.tensors if "attn_qkv" in names and ".ssm_out." in name}
    for file in files:
        for found in [found for name in file.tensors if (found := FUSED.fullmatch(name))]:
            name, layer, end = found[0], found[1], found[2]
            if f"blk.{layer}.ssm_out.weight" not in with_state:
                file.tensors |= _parts(file.tensors.pop(name), name, f"blk.{layer}.attn_{{}}.{end}", keys, int(layer))


def _parts(tensor: GgufTensor, name: str, form: str, keys: Keys, layer: int) -> dict[str, GgufTensor]:
    """The three parts of a tensor, by the names that `form` gives them."""
    heads = _of_layer(keys, "attention.head_count", layer)
    groups = _of_layer(keys, "attention.head_count_kv", layer) if "attention.head_count_kv" in keys else heads
    slides = "attention.key_length_swa" in keys and _of_layer(keys, "attention.sliding_window_pattern", layer)
    usual = keys.read("embedding_length") // max(1, heads)
    widths = [keys.read(f"attention.{part}_length{'_swa' if slides else ''}", usual) for part in ("key", "value")]
    k, v = (groups * width for width in widths)
    is_whole = len(tensor.shape) == 2 or len(tensor.shape) == 1 and isinstance(tensor.kind, torch.dtype)
    rows = tensor.shape[0] if is_whole else 0
    if not 0 < k + v < rows or min(k, v) < 0:
        raise ValueError(
            f"{keys.path}: {name} must have the rows of queries, of {k} keys and of {v} values; it has {rows}"
        )
    row_bytes, found, begin = tensor.nbytes // rows, {}, tensor.begin
    for part, count in (("q", rows - k - v), ("k", k), ("v", v)):
        found[form.format(part)] = tensor._replace(shape=(count, *tensor.shape[1:]), begin=begin)
        begin += count * row_bytes
    return found


def _of_layer(keys: Keys, name: str, layer: int) -> int:
    """The integer of a layer: that of an array, or the same for all. Raises ValueError if there is none."""
    values = keys.get(name)
    if not isinstance(values, np.ndarray):
        return keys.read(name)
    if layer >= len(values):
        raise ValueError(f"{keys.path}: {keys.prefix}{name} has {len(values)} numbers, and none for layer {layer}")
    return keys.per_layer(name, len(values))[layer]
