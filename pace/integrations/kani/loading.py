"""Loads a model with the arguments of kani's HuggingEngine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pace.llm import LLMModel

logger = logging.getLogger("pace")

NAMES = {"quantization_config": "quantization"}
"""Maps transformers' names to arguments of LLMModel, except those that LLMModel accepts itself."""
NEEDLESS = {
    "low_cpu_mem_usage": "pace never holds a checkpoint twice",
    "use_safetensors": "pace reads what is there, and safetensors first",
    "attn_implementation": "pace has one attention",
    "trust_remote_code": "pace runs no code of a checkpoint",
}


def open_model(
    model_id: str | Path, token: str | bool | None, device: Any, load_kwargs: Mapping[str, Any] | None
) -> LLMModel:
    """Loads a directory, a GGUF file or a Hub id. `load_kwargs` are arguments of LLMModel, or of transformers'
    `from_pretrained`. Raises ValueError for a device other than the CPU, TypeError for unknown arguments, and what
    LLMModel raises."""
    check_device(device)
    options: dict[str, Any] = {"token": token}
    for name, value in (load_kwargs or {}).items():
        if name in ("device", "device_map"):
            check_device(value.get("") if isinstance(value, Mapping) else value)
        elif name in NEEDLESS:
            logger.warning("%s has no effect: %s", name, NEEDLESS[name])
        elif not (name in ("dtype", "torch_dtype") and value in ("auto", None)):
            options[NAMES.get(name, name)] = value
    return LLMModel(model_id, **options)


def check_device(device: Any) -> None:
    """Raises ValueError for a device other than the CPU."""
    if device not in (None, "auto") and str(device) != "cpu":
        raise ValueError(f"pace computes on the CPU; got device={device!r:.60}")
