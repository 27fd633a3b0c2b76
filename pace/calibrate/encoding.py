"""Writes a quantised model in the compressed-tensors format (tensors and `quantization_config`), which other tools read
too.

    int4    weight_packed int32 [N, ceil(K / 8)], eight codes a word along K, the lowest bits first
            weight_shape int64 [2] = N, K

    int8    weight int8 [N, K]

    both    weight_scale [N, groups], float32; bfloat16 for calibrated groups

An LM head tied to an int8 embedding gets a second copy of weight_scale: transformers ties only the codes of the two.

Source: https://github.com/vllm-project/compressed-tensors"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pace.checkpoints.safetensors_file import TensorInfo
from pace.ops.weight_layout import QuantizedRows, WeightLayout

LAYOUTS = {"int4": "pack-quantized", "int8": "int-quantized"}


def planned(
    module: str, shape: tuple[int, int], layout: WeightLayout, scale_dtype: torch.dtype
) -> dict[str, TensorInfo]:
    """The tensors that hold the matrix `{module}.weight` of this shape, with scales in `scale_dtype`."""
    n, k = shape
    scales = TensorInfo(scale_dtype, (n, layout.num_groups(k)))
    if layout.code == "int8":
        return {f"{module}.weight": TensorInfo(torch.int8, (n, k)), f"{module}.weight_scale": scales}
    return {
        f"{module}.weight_packed": TensorInfo(torch.int32, (n, -(-k // 8))),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": TensorInfo(torch.int64, (2,)),
    }


def encode(module: str, rows: QuantizedRows) -> dict[str, Tensor]:
    """Rows of these tensors, with unchanged scales. `weight_shape` has no rows and is not included."""
    if rows.layout.code == "int8":
        return {f"{module}.weight": rows.codes, f"{module}.weight_scale": rows.scales}
    codes = functional.pad(rows.codes, (0, -rows.shape[1] % 8), value=8)
    return {
        f"{module}.weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int32),
        f"{module}.weight_scale": rows.scales,
    }


def shares_codes(layout: WeightLayout | None) -> bool:
    """True if other tools can share an embedding's codes of this layout with a tied LM head."""
    return layout is not None and layout.code == "int8"


def quantization_config(
    modules: Mapping[str, WeightLayout | None], embeddings: set[str], tied: str | None
) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json. The most common layout of products applies to all "Linear"
    modules; embeddings and modules with other layouts are listed by name.

    `modules`: layout of each matrix, None for floats.
    `tied`: the embedding that is also the LM head. Other tools treat the head as a "Linear" module."""
    kinds = {name: (layout, name in embeddings) for name, layout in modules.items() if layout}
    products = [layout for layout, is_embedding in kinds.values() if not is_embedding]
    usual = (max(dict.fromkeys(products), key=products.count, default=None), False)
    groups: dict[str, Any] = {}
    for index, kind in enumerate(sorted(set(kinds.values()), key=lambda kind: (kind != usual, str(kind)))):
        targets = ["Linear"] if kind == usual else [name for name, found in kinds.items() if found == kind]
        targets += ["lm_head"] * (tied in targets and shares_codes(kind[0]))
        groups[f"group_{index}"] = _group(*kind, targets)
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name for name, layout in modules.items() if layout is None]
        + ["lm_head"] * (tied is not None and not shares_codes(modules[tied])),
    }


def _group(layout: WeightLayout, is_embedding: bool, targets: list[str]) -> dict[str, Any]:
    by_row = layout.group is None
    weights = {
        "num_bits": int(layout.code.removeprefix("int")),
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if by_row else "group",
        "group_size": None if by_row else layout.group,
        "dynamic": False,
    }
    inputs = (
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        if layout.code == "int8" and not is_embedding
        else None
    )
    return {
        "format": LAYOUTS[layout.code],
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
