"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

    blk.0.attn_q.weight.lora_a [r, K]    ->  model.layers.0.self_attn.q_proj, A
    blk.0.attn_q.weight.lora_b [N, r]        B, with the rows of a permuted matrix in the Hub's order

An embedding has A transposed, and experts have a pair of matrices each:

    token_embd.weight.lora_a [V, r]
    blk.0.ffn_up_exps.weight.lora_a [E, r, K]
    blk.0.ffn_up_exps.weight.lora_b [E, N, r]

The scale is alpha / r for every module: the format has neither alpha_pattern nor use_rslora."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.checkpoints.gguf.architectures.architecture import Architecture
from pace.checkpoints.gguf.architectures.registry import ARCHITECTURES
from pace.checkpoints.gguf.blocks import BlockType
from pace.checkpoints.gguf.checkpoint import hub_order
from pace.checkpoints.gguf.file import GgufFile
from pace.llm.adapters.weights import AdapterModule, AdapterWeights, ExpertMatrices
from pace.naming import shown
from pace.ops.blocks import BlockRows

ENDS = {".weight.lora_a": "A", ".weight.lora_b": "B"}
EXPERTS = "_exps"
"""End of the names of matrices of all experts."""
ROW_ORDERS = frozenset({"qkv_by_head", "qkv_by_group", "qkvz_by_head", "value_heads_tiled"})
"""Fields of a config that say that a GGUF file has the rows of some matrices in another order than the Hub."""
REORDERED = ("qwen35", "qwen35moe")
"""Architectures whose files have such an order without a default for it."""
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Matrices whose rows are permuted in some architectures, and the field with their number of heads."""
TABLES = {"token_embd": True, "per_layer_token_embd": True, "position_embd": False}
"""Embeddings in a file, and whether llama.cpp writes A transposed."""
SAME_FILES = {"mistral": "llama", "mixtral": "llama", "granitemoeshared": "granitemoe"}
"""Model types whose files have the architecture of another."""


def read_gguf(path: Path, name: str, config: Mapping[str, Any], architecture: str | None) -> AdapterWeights:
    """Reads the adapter in a GGUF file. `name` is for messages. `config` is the base's config.json, and `architecture`
    the architecture of its own GGUF file, or None.

    Raises the errors of opening a GGUF file, and NotImplementedError for what is not implemented. Raises ValueError for
    a file that is no adapter or not one of the base, and for values that are not finite. The message names the file."""
    file = GgufFile(path)
    try:
        found = _find_architecture(file, config, architecture)
        alpha = _read_alpha(file)
        matrices: dict[str, dict[str, Tensor]] = {}
        for source in sorted(file.tensors):
            inner, part = _split(path, source)
            matrices.setdefault(inner, {})[part] = _read(file, source, 3 if inner.endswith(EXPERTS) else 2)
        if not matrices:
            raise ValueError(f"{path} has no tensors of an adapter, such as blk.0.attn_q.weight.lora_a")
        modules: dict[str, AdapterModule] = {}
        experts: dict[str, list[ExpertMatrices]] = {}
        for inner, parts in matrices.items():
            tensor = found.names.on_hub(f"{inner}.weight")
            if inner.endswith(EXPERTS):
                of_all, _, one = tensor.rpartition(".experts.")
                experts.setdefault(f"{of_all}.experts", []).append(_experts(path, one, parts, alpha))
            else:
                module = tensor.removesuffix(".weight")
                num_heads = _num_heads(module, found, config)
                modules[module] = _module(path, module, parts, alpha, num_heads, TABLES.get(inner))
        return AdapterWeights(name, modules, experts)
    finally:
        file.close()


def _find_architecture(file: GgufFile, config: Mapping[str, Any], architecture: str | None) -> Architecture:
    """Returns the record of the adapter's architecture, which must be that of the base."""
    metadata, path = file.metadata, file.path
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.text(key) != wanted:
            raise ValueError(f"{path} is not a LoRA adapter: {key} must be {wanted!r}; got {shown(metadata.text(key))}")
    if "adapter.alora.invocation_tokens" in metadata:
        raise NotImplementedError(f"{path} begins at a token of the prompt (aLoRA), which is not implemented")
    name = metadata.required("general.architecture", metadata.text("general.architecture"))
    records = [each for each in ARCHITECTURES if each.name == name]
    model_type = str(config.get("model_type"))
    if architecture is None:
        types = (model_type, SAME_FILES.get(model_type))
        record = next((each for each in records if each.model_type in types), None)
        if record and (ROW_ORDERS & record.defaults.keys() or name in REORDERED):
            raise NotImplementedError(
                f"{path}: GGUF files of {name!r} have the rows of some matrices in another order, so that this adapter "
                "only fits a base in a GGUF file; use the adapter that PEFT saved"
            )
    else:
        same = [each for each in records if each.model_type == model_type] or records
        record = same[0] if same and name == architecture else None
    if record is None:
        raise ValueError(
            f"{path} is an adapter for the architecture {shown(name)}, and the base model is "
            f"{shown(architecture or model_type)}"
        )
    return record


def _read_alpha(file: GgufFile) -> float:
    """Returns alpha; 0 if every module's scale is 1."""
    alpha = file.metadata.number("adapter.lora.alpha", 0.0)
    if not math.isfinite(alpha):
        raise ValueError(f"{file.path}: adapter.lora.alpha must be finite; got {alpha}")
    return float(alpha)


def _split(path: Path, source: str) -> tuple[str, str]:
    """Returns the name in the file of the matrix that a tensor changes, and "A" or "B"."""
    end = next((end for end in ENDS if source.endswith(end)), None)
    if end is None:
        what = "norms" if source.endswith("_norm.weight") else "tensors other than .lora_a and .lora_b"
        raise NotImplementedError(f"{path} has the tensor {source[:200]!r}: {what} are not implemented in adapters")
    return source.removesuffix(end), ENDS[end]


def _read(file: GgufFile, source: str, num_dimensions: int) -> Tensor:
    """Returns a matrix, or those of all experts, as floats in memory of its own."""
    tensor = file.tensors[source]
    if len(tensor.shape) != num_dimensions or 0 in tensor.shape:
        wanted = "a matrix" if num_dimensions == 2 else "a matrix of each expert"
        raise ValueError(f"{file.path}: {source[:200]!r} must be {wanted}; its shape is {list(tensor.shape)}")
    raw = file.rows(source)
    if isinstance(tensor.kind, BlockType):
        matrix = BlockRows(tensor.kind, raw).dequantize()
    else:
        matrix = raw.clone().view(tensor.kind)
    matrix = matrix.float() if matrix.dtype == torch.float64 else matrix
    if not torch.isfinite(matrix).all():
        raise ValueError(f"{file.path}: {source[:200]!r} has values that are not finite")
    return matrix.reshape(tensor.shape)


def _num_heads(module: str, architecture: Architecture, config: Mapping[str, Any]) -> int | None:
    """Number of heads of a module with permuted rows; None for others."""
    field = HEADS.get(module.rpartition(".")[2]) if architecture.permuted else None
    return field and (config.get(field) or config.get("num_attention_heads"))


def _module(
    path: Path, module: str, parts: dict[str, Tensor], alpha: float, num_heads: int | None, is_transposed: bool | None
) -> AdapterModule:
    """Returns the adapter of a module. `is_transposed` is about A of an embedding; None for other modules."""
    a, b = _pair(path, module, parts, is_transposed or False)
    if num_heads:
        if b.shape[0] % (2 * num_heads):
            raise ValueError(f"{path}: B of {module} has {b.shape[0]} rows, which are not those of {num_heads} heads")
        b = b[hub_order(range(b.shape[0]), b.shape[0] // num_heads)]
    return AdapterModule(a, b, None, _scale(alpha, a.shape[0]), is_transposed is not None)


def _experts(path: Path, tensor: str, parts: dict[str, Tensor], alpha: float) -> ExpertMatrices:
    """Returns the adapters of all experts, in the form of PEFT."""
    a, b = _pair(path, tensor, parts)
    if len(a) != len(b):
        raise ValueError(f"{path}: A of {tensor} has {len(a)} experts, and B has {len(b)}")
    return ExpertMatrices(a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), lambda _, rank: _scale(alpha, rank), tensor)


def _pair(path: Path, module: str, parts: dict[str, Tensor], is_transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Returns A and B. Raises ValueError if one is missing, or if their ranks differ."""
    if missing := {"A", "B"} - parts.keys():
        raise ValueError(f"{path} has only one matrix for {module}: {missing.pop()} is missing")
    a, b = parts["A"].T if is_transposed else parts["A"], parts["B"]
    if a.shape[-2] != b.shape[-1]:
        raise ValueError(
            f"{path}: the matrices of {module} do not fit together; A is [r, K], B [N, r]; got {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    return a, b


def _scale(alpha: float, rank: int) -> float:
    return alpha / rank if alpha else 1.0
