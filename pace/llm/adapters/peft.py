"""Adapters as PEFT saves them: adapter_config.json, and adapter_model.safetensors or .bin.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight  [r, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight  [N, r]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias    [N]      with lora_bias

PEFT also saves whole matrices of the base, unchanged, if a vocabulary was resized or an embedding is a target. Those
are compared with the base's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pace.checkpoints.reader import WEIGHT_DTYPES
from pace.checkpoints.safetensors_file import SafetensorsFile
from pace.checkpoints.torch_file import TorchFile
from pace.llm.adapters.peft_config import PeftConfig
from pace.llm.adapters.weights import AdapterModule, AdapterWeights

PREFIX = "base_model.model."
"""What PEFT puts before the names of the base."""
FILES = {"adapter_model.safetensors": SafetensorsFile, "adapter_model.bin": TorchFile}
"""Files of weights, the preferred one first."""
PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB]\.weight|lora_B\.bias)")
UNSUPPORTED = {
    r".*\.lora_embedding_[AB]": "adapters of embeddings are not implemented",
    r".*\.lora_magnitude_vector(\.weight)?": (
        "magnitudes of rows (DoRA) are not implemented; merge the adapter with PEFT's merge_and_unload"
    ),
    r".*\.experts(\.base_layer)*\.lora_[AB]\.weight": "adapters of fused experts are not implemented",
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
        return AdapterWeights(name, _read_modules(file, config, base))
    finally:
        file.close()


def _read_modules(file: SafetensorsFile | TorchFile, config: PeftConfig, base: Base) -> dict[str, AdapterModule]:
    parts: dict[str, dict[str, Tensor]] = {}
    wholes: list[str] = []
    for source in sorted(file.tensors):
        inner = source.removeprefix(PREFIX)
        for pattern, why in UNSUPPORTED.items():
            if re.fullmatch(pattern, inner):
                raise NotImplementedError(f"{file.path} has the tensor {source[:200]!r}: {why}")
        if found := PART.fullmatch(inner):
            parts.setdefault(found["module"], {})[found["part"]] = _read(file, source)
        else:
            wholes.append(source)
    for source in wholes:
        _check_copy(file, source, base)
    if not parts:
        raise ValueError(f"{file.path} has no tensors of a LoRA adapter, such as ...q_proj.lora_A.weight")
    return {module: _module(file.path, module, found, config) for module, found in sorted(parts.items())}


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
    missing = [part for part in ("lora_A.weight", "lora_B.weight") if part not in parts]
    if missing:
        raise ValueError(f"{path} has {module}.{next(iter(parts))}, but no {missing[0]} for it")
    a, b, bias = parts["lora_A.weight"], parts["lora_B.weight"], parts.get("lora_B.bias")
    if bias is not None and not config.has_bias:
        raise ValueError(f"{path} has {module}.lora_B.bias, but lora_bias is not true in {config.path.name}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or (bias is not None and bias.shape != b.shape[:1]):
        shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
        raise ValueError(f"{path}: the parts of {module} do not fit together; A is [r, K], B [N, r]; got {shapes}")
    return AdapterModule(a, b, bias, config.scale(module, a.shape[0]))


def _check_copy(file: SafetensorsFile | TorchFile, source: str, base: Base) -> None:
    """Raises unless a whole tensor of the file is the base's own."""
    name = source.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
    try:
        own = base(name)
    except KeyError:
        raise ValueError(
            f"{file.path} has the tensor {source[:200]!r}, which is neither a part of a LoRA adapter nor in the base "
            "model"
        ) from None
    copy = file.read(source)
    if own is not None and own.shape == copy.shape and _are_equal(own, copy):
        return
    if own is None:
        raise ValueError(
            f"{file.path} has {source[:200]!r} in full, and the base model is quantised, so that they cannot be "
            "compared; save the adapter with save_embedding_layers=False"
        )
    raise NotImplementedError(
        f"{file.path} has {source[:200]!r} in full, with other values than the base model ({list(copy.shape)} and "
        f"{list(own.shape)}): a changed vocabulary, and modules trained in full, are not implemented"
    )


def _are_equal(own: Tensor, copy: Tensor) -> bool:
    """True if two tensors are the same, after one of them was rounded to the other's dtype."""
    return torch.equal(own.to(copy.dtype), copy) or torch.equal(own, copy.to(own.dtype))
