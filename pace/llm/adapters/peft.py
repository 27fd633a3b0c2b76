"""Adapters as PEFT saves them: adapter_config.json, and adapter_model.safetensors or .bin.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight  [r, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight  [N, r]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias    [N]      with lora_bias
    base_model.model.model.embed_tokens.lora_embedding_A            [r, V]   an embedding
    base_model.model.model.embed_tokens.lora_embedding_B            [H, r]

All experts of a mixture (`ExpertMatrices`), a further tensor of them, and a module in modules_to_save:

    base_model.model.model.layers.0.mlp.experts.lora_A.weight       [E r, K]
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight
    base_model.model.lm_head.weight                                 [V, H]

PEFT also saves whole matrices of the base, unchanged, if a vocabulary was resized or an embedding is a target. Those
are compared with the base's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pace.checkpoints.reader import WEIGHT_DTYPES
from pace.checkpoints.safetensors_file import SafetensorsFile
from pace.checkpoints.torch_file import TorchFile
from pace.llm.adapters.peft_config import PeftConfig
from pace.llm.adapters.weights import AdapterModule, AdapterWeights, ExpertMatrices

PREFIX = "base_model.model."
"""What PEFT puts before the names of the base."""
FILES = {"adapter_model.safetensors": SafetensorsFile, "adapter_model.bin": TorchFile}
"""Files of weights, the preferred one first."""
PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB])")
EXPERTS = re.compile(r"(?P<path>.*\.experts)(?P<depth>(\.base_layer)*)")
"""The module of all experts. PEFT wraps it once for each of its tensors; the innermost wrapper is that of the first."""
UNSUPPORTED = {
    r".*\.lora_magnitude_vector(\.weight)?": (
        "magnitudes of rows (DoRA) are not implemented; merge the adapter with PEFT's merge_and_unload"
    ),
    r".*\.lora_A\.bias": "biases of A are not implemented",
    r".*\.lora_[AB]\.[^.]+\.(weight|bias)": (
        "the adapter's own name is not expected in names of tensors; save it with PEFT's save_pretrained"
    ),
    r".*\.(trainable_tokens_\w+|token_adapter\..*)": "embeddings of single tokens are not implemented",
}
"""Names of tensors that are not implemented -> the reason."""
Base = Callable[[str], Tensor | None]
"""Returns a tensor of the base model by name; None if the base does not have it as floats. Raises KeyError for a name
that the base does not have."""


def read_peft(directory: Path, name: str, base: Base) -> AdapterWeights:
    """Reads an adapter that PEFT has saved. `name` is for messages. `base` is called for whole matrices in the file.

    Raises FileNotFoundError (no config, no weights), PermissionError, and NotImplementedError. Raises ValueError for
    anything damaged, unknown or contradictory, and for values that are not finite. The message names the file."""
    config = PeftConfig.read(directory)
    path = next((directory / file for file in FILES if (directory / file).exists()), None)
    if path is None:
        raise FileNotFoundError(f"{directory} has no weights of an adapter: it needs {' or '.join(FILES)}")
    file = FILES[path.name](path)
    try:
        return _read_weights(file, name, config, base)
    finally:
        file.close()


def _read_weights(file: SafetensorsFile | TorchFile, name: str, config: PeftConfig, base: Base) -> AdapterWeights:
    parts: dict[str, dict[str, Tensor]] = {}
    whole: list[str] = []
    for source in sorted(file.tensors):
        inner = source.removeprefix(PREFIX)
        for pattern, why in UNSUPPORTED.items():
            if re.fullmatch(pattern, inner):
                raise NotImplementedError(f"{file.path} has the tensor {source[:200]!r}: {why}")
        if found := PART.fullmatch(inner):
            parts.setdefault(found["module"], {})[found["part"]] = _read(file, source)
        else:
            whole.append(source)
    config.check_saved(file.path, [_base_name(source) for source in whole])
    read = {_base_name(source): _read_whole(file, source, config, base) for source in whole}
    changed = {name: tensor for name, tensor in read.items() if tensor is not None}
    if not parts and not changed:
        raise ValueError(f"{file.path} has no tensors of a LoRA adapter, such as ...q_proj.lora_A.weight")
    modules: dict[str, AdapterModule] = {}
    experts: dict[str, list[ExpertMatrices]] = {}
    for module, found in sorted(parts.items(), key=lambda item: (-item[0].count(".base_layer"), item[0])):
        if of_experts := EXPERTS.fullmatch(module):
            a, b, _ = _matrices(file.path, module, found, config, are_experts=True)
            experts.setdefault(of_experts["path"], []).append(ExpertMatrices(a, b, config.scale))
        else:
            modules[module] = _module(file.path, module, found, config)
    _check_tying(file.path, modules, config)
    return AdapterWeights(name, modules, experts, changed)


def _base_name(source: str) -> str:
    """The base's name of a whole tensor."""
    return source.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")


def _read(file: SafetensorsFile | TorchFile, source: str) -> Tensor:
    """Returns a copy of a tensor in memory. Raises ValueError unless it is a matrix or vector of finite floats."""
    info = file.tensors[source]
    if info.dtype not in WEIGHT_DTYPES or len(info.shape) not in (1, 2) or 0 in info.shape:
        raise ValueError(
            f"{file.path}: {source[:200]!r} must be a matrix or a vector of floats; it has the shape "
            f"{list(info.shape)} and the dtype {str(info.dtype).removeprefix('torch.')}"
        )
    tensor = file.read(source).clone().view(info.shape)
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{file.path}: {source[:200]!r} has values that are not finite")
    return tensor


def _module(path: Path, module: str, parts: dict[str, Tensor], config: PeftConfig) -> AdapterModule:
    """Returns the adapter of a module. Raises ValueError if a part is missing or has another shape."""
    a, b, bias = _matrices(path, module, parts, config)
    of_embedding = "lora_embedding_A" in parts
    return AdapterModule(a, b, bias, config.scale(module, a.shape[0]), of_embedding)


def _matrices(
    path: Path, module: str, parts: dict[str, Tensor], config: PeftConfig, are_experts: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns A, B and the bias of a module. Raises ValueError if a part is missing or has another shape."""
    of_embedding = any(part.startswith("lora_embedding") for part in parts) and not are_experts
    names = [f"lora_embedding_{part}" if of_embedding else f"lora_{part}.weight" for part in "AB"]
    for name in names:
        if name not in parts:
            raise ValueError(f"{path} has {module}.{next(iter(parts))}, but no {name} for it")
    (a, b), bias = (parts[name] for name in names), parts.get("lora_B.bias")
    if bias is not None and not config.has_bias:
        raise ValueError(f"{path} has {module}.lora_B.bias, but lora_bias is not true in {config.path.name}")
    fits = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1] and (bias is None or bias.shape == b.shape[:1])
    if not fits or parts.keys() - {*names, "lora_B.bias"} or (bias is not None and (are_experts or of_embedding)):
        shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
        raise ValueError(f"{path}: the parts of {module} do not fit together; A is [r, K], B [N, r]; got {shapes}")
    return a, b, bias


def _check_tying(path: Path, modules: Mapping[str, AdapterModule], config: PeftConfig) -> None:
    """Raises NotImplementedError if the adapter of an embedding stands for that of the head, too."""
    tables = [module for module, found in modules.items() if found.of_embedding]
    if config.ensures_tying and tables and not any(module.endswith("lm_head") for module in modules):
        raise NotImplementedError(
            f"{config.path}: with ensure_weight_tying, the adapter of {tables[0]} also changes a tied head, and "
            f"{path.name} has none for it, which is not implemented"
        )


def _read_whole(file: SafetensorsFile | TorchFile, source: str, config: PeftConfig, base: Base) -> Tensor | None:
    """Returns a tensor of a module that was trained in full; None for the base's own. Raises for any other one."""
    name, copy = _base_name(source), file.read(source).view(file.tensors[source].shape)
    try:
        own, is_known = base(name), True
    except KeyError:
        own, is_known = None, False
    if own is not None and own.shape == copy.shape and _are_equal(own, copy):
        return None
    is_trained = config.was_trained_in_full(name)
    if is_trained and copy.dim() > 2:
        raise NotImplementedError(
            f"{file.path} has {source[:200]!r} in full, {list(copy.shape)}, as modules_to_save asks in "
            f"{config.path.name}: experts and convolutions trained in full are not implemented; merge the adapter with "
            "PEFT's merge_and_unload"
        )
    if not is_known:
        raise ValueError(
            f"{file.path} has the tensor {source[:200]!r}, which is neither a part of a LoRA adapter nor in the base "
            "model"
        )
    if is_trained and (own is None or own.shape == copy.shape):
        return _read(file, source)
    if own is None:
        raise ValueError(
            f"{file.path} has {source[:200]!r} in full, and the base model is quantised, so that they cannot be "
            "compared; save the adapter with save_embedding_layers=False"
        )
    raise NotImplementedError(
        f"{file.path} has {source[:200]!r} in full, with other values than the base model ({list(copy.shape)} and "
        f"{list(own.shape)}): a changed vocabulary is not implemented, nor are modules trained in full that "
        "modules_to_save does not name"
    )


def _are_equal(own: Tensor, copy: Tensor) -> bool:
    """True if two tensors are the same, after one of them was rounded to the other's dtype."""
    return torch.equal(own.to(copy.dtype), copy) or torch.equal(own, copy.to(own.dtype))
