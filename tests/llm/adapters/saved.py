"""Adapters on disk: saved by peft for the bundled model, and written by hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pace.assets import TINY
from tests.llm.adapters.random_adapters import random_adapter

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
MODULE = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."


@functools.cache
def bundled_network() -> torch.nn.Module:
    """The bundled model in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def save_adapter(path: Path, seed: int, save: Any = None, **fields: Any) -> torch.nn.Module:
    """Saves a random adapter of the bundled model with peft, and returns peft's model. `save` are arguments of
    `save_pretrained`, `fields` those of a LoraConfig."""
    fields = {"target_modules": ["q_proj", "v_proj", "down_proj"]} | fields
    adapted, _ = random_adapter(bundled_network(), seed, fields.pop("target_modules"), **fields)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(3.0)  # a change that greedy texts show
    adapted.save_pretrained(path, **(save or {}))
    return adapted


def write(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "safetensors") -> Path:
    """Writes an adapter by hand. Names of tensors get PEFT's prefix."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {PREFIX + key: tensor.contiguous() for key, tensor in tensors.items()}
    if name == "safetensors":
        save_file(tensors, path / "adapter_model.safetensors")
    else:
        torch.save(tensors, path / "adapter_model.bin")
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "adapter_model.safetensors")


def pair(module: str = MODULE, r: int = 2, k: int = 256, n: int = 256) -> dict[str, torch.Tensor]:
    """The two matrices of a module."""
    return {f"{module}.lora_A.weight": torch.randn(r, k), f"{module}.lora_B.weight": torch.randn(n, r)}
