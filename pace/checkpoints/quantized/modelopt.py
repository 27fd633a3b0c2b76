"""NVIDIA's ModelOpt: float8 and NVFP4 matrices, each with scales of its own.

    NVFP4, W4A16_NVFP4           weight uint8 [N, K / 2], see nvfp4.py

    FP8                          weight float8_e4m3fn [N, K], weight_scale [] or [1]
    FP8_PER_CHANNEL_PER_TOKEN    the same, weight_scale [N]

    FP8_PB_WO                    the same, weight_scale [N / 128, 1, K / 128, 1]

    MXFP8                        the same, weight_scale uint8 [N, K / 32], exponents (E8M0)

    MIXED_PRECISION              any of these, by module

The shapes of a module's tensors show which it has. The settings are in config.json, or in hf_quant_config.json under
`quantization`. Scales of activations are not used.

Source: the code of vLLM, https://github.com/vllm-project/vllm"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.checkpoints.quantized.fp8 import Float8Matrix
from pace.checkpoints.quantized.method import Method, modules_stored_as, refused, wrong
from pace.checkpoints.quantized.nvfp4 import NVFP4Matrix
from pace.checkpoints.quantized.stored import StoredMatrix, StoredTensors

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4")
MIXED = "MIXED_PRECISION"
ADVICE = f"implemented: {', '.join(ALGORITHMS)}, {MIXED}; take a checkpoint in one of these, or the original"
BLOCKS = [(128, 128), (1, 32)]
INPUT_FACTORS = ".pre_quant_scale"


@dataclass(frozen=True)
class ModelOpt(Method):
    name: ClassVar[str] = "modelopt"
    unused: ClassVar[tuple[str, ...]] = (".input_scale",)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelOpt:
        settings = raw.get("quantization", raw)
        if not isinstance(settings, dict):
            raise wrong("quantization", "an object", settings)
        algorithm = _read_algorithm(settings, "quant_algo")
        if algorithm == MIXED:
            layers = settings.get("quantized_layers")
            if layers is not None and not isinstance(layers, dict):
                raise wrong("quantized_layers", "an object", layers)
            for layer, of_layer in (layers or {}).items():
                field = f"quantized_layers.{layer[:80]}"
                if not isinstance(of_layer, dict):
                    raise wrong(field, "an object with a quant_algo", of_layer)
                if _read_algorithm(of_layer, "quant_algo", f"{field}.") == MIXED:
                    raise refused(f"{field}.quant_algo", MIXED, ADVICE)
        return cls()

    def matrices(self, source: StoredTensors) -> Iterator[StoredMatrix]:
        if name := next((name for name in source.tensors if name.endswith(INPUT_FACTORS)), None):
            raise NotImplementedError(f"tensor {name!r} scales inputs, which is not implemented; {ADVICE}")
        for module in modules_stored_as(source, torch.uint8):
            yield NVFP4Matrix(source, module, ".weight", ".weight_scale_2", divides=False)
        for module in modules_stored_as(source, torch.float8_e4m3fn):
            yield Float8Matrix(source, module, ".weight_scale", BLOCKS)


def _read_algorithm(raw: dict[str, Any], field: str, where: str = "") -> str:
    value = raw.get(field)
    if not isinstance(value, str):
        raise wrong(where + field, f"one of {', '.join(ALGORITHMS)}, {MIXED}", value)
    if value.upper() not in (*ALGORITHMS, MIXED):
        raise refused(where + field, value, ADVICE)
    return value.upper()
