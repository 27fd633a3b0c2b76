"""Reads `quantization_config` of config.json: the supported methods, and advice for the others."""

from __future__ import annotations

from typing import Any

from pace.checkpoints.quantized.awq import AWQ
from pace.checkpoints.quantized.bitnet import BitNet
from pace.checkpoints.quantized.bitsandbytes import BitsAndBytes
from pace.checkpoints.quantized.compressed_tensors import CompressedTensors
from pace.checkpoints.quantized.fp8 import FP8
from pace.checkpoints.quantized.gptq import GPTQ
from pace.checkpoints.quantized.method import Method, refused, wrong
from pace.checkpoints.quantized.modelopt import ModelOpt
from pace.checkpoints.quantized.mxfp4 import MXFP4

METHODS: dict[str, type[Method]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "mxfp8": FP8,
    "mxfp4": MXFP4,
    "bitnet": BitNet,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), ModelOpt),
}
"""`quant_method` -> class that reads it."""

AT_LOAD = "take the original checkpoint, and load it with quantization="
OTHERS = {
    **dict.fromkeys(("aqlm", "quip", "vptq", "higgs", "spqr", "hqq", "sinq"), AT_LOAD + '"int4"'),
    **dict.fromkeys(("quanto", "torchao"), AT_LOAD + '"int8" or "int4"'),
    **dict.fromkeys(("fp_quant", "nvfp4"), AT_LOAD + '"mxfp4"'),
    "eetq": AT_LOAD + '"int8"',
    "quark": AT_LOAD + '"int8" or "fp8"',
    "fbgemm_fp8": AT_LOAD + '"fp8"',
    **dict.fromkeys(
        ("auto-round", "intel/auto-round"),
        "take a checkpoint that AutoRound exported in the format of GPTQ or AWQ, or the original",
    ),
    "gguf": "give the .gguf file",
}
"""Advice for known methods that are not supported."""


def read_quant_method(raw: Any) -> Method | None:
    """Returns the method that reads a checkpoint with this `quantization_config`; None for null. Raises ValueError for
    invalid fields, NotImplementedError that names an unsupported method."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"config.json: quantization_config must be an object or null; got {str(raw)[:80]!r}")
    # Early transformers marked bitsandbytes checkpoints by these two fields only.
    default = "bitsandbytes" if raw.get("load_in_4bit") or raw.get("load_in_8bit") else None
    name = raw.get("quant_method") or default
    if not isinstance(name, str):
        raise wrong("quant_method", f"one of {', '.join(METHODS)}", name)
    key = name.lower()
    if key in ("bitsandbytes_4bit", "bitsandbytes_8bit"):
        key = "bitsandbytes"
    if key in METHODS:
        return METHODS[key].from_dict(raw)
    instead = OTHERS.get(key, AT_LOAD + "one of its formats")
    raise refused("quant_method", name, f"{instead}. Implemented: {', '.join(METHODS)}")
