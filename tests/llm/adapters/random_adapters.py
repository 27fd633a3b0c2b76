"""Random adapters of tiny models, made by peft, as pace's weights."""

from __future__ import annotations

import copy
import re

import peft
import torch
from transformers.pytorch_utils import Conv1D

from pace.llm.adapters.weights import AdapterModule, AdapterWeights

LEFT_OUT = r"(.*\.)?(lm_head|embed_out|output_layer|kv_b_proj|(vision|visual|experts)\..*)"
"""Modules that take no unmerged adapters, and the head, which has tests of its own."""


def targets_of(model: torch.nn.Module) -> list[str]:
    """Names of all modules that an adapter can change."""
    products = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    found = [name for name in products if not re.fullmatch(LEFT_OUT, name)]
    if any("mamba" in part for part in (getattr(model.config, "model_type", ""), *found)):
        found = [name for name in found if not name.endswith("out_proj")]  # peft refuses these
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        found = [name for name in found if ".mlp." not in name]  # peft changes experts with dense layers, too
    return found


def random_adapter(
    model: torch.nn.Module, seed: int, targets: list[str] | None = None, **fields: object
) -> tuple[torch.nn.Module, AdapterWeights]:
    """Returns a copy of a model with an adapter, and the adapter's weights. A third of a module's output comes from
    it."""
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": targets or targets_of(model), "init_lora_weights": False} | fields
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                spread = 0.5 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.1
                parameter.normal_(0.0, spread, generator=generator)
    return adapted, weights_of(adapted, f"random {seed}")


def weights_of(adapted: torch.nn.Module, name: str) -> AdapterWeights:
    """The adapter of a model of peft. Readers have tests of their own."""
    modules = {}
    for path, module in adapted.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            path = path.removeprefix("base_model.model.")
            if module.lora_embedding_A:
                a, b = (found["default"].detach() for found in (module.lora_embedding_A, module.lora_embedding_B))
                modules[path] = AdapterModule(a, b, None, module.scaling["default"], of_embedding=True)
                continue
            a, b = module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach()
            bias = module.lora_B["default"].bias
            bias = None if bias is None else bias.detach()
            modules[path] = AdapterModule(a, b, bias, module.scaling["default"])
    return AdapterWeights(name, modules)


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model = model.base_model.model if isinstance(model, peft.PeftModel) else model
    return model(ids[None], use_cache=False).logits[0].float()
