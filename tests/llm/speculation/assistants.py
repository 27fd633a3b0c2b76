"""Tiny checkpoints of Gemma 4 and of its assistant, made by transformers, and the drafts of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.llm.models.families.gemma4_variants import FULL, SLIDING
from tests.llm.models.variants import config_fields, randomise, save_pretrained, save_tiny

ASSISTANT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
"""Text fields that an assistant does not take over from its target."""
OF_TARGET = (
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "sliding_window",
    "attention_k_eq_v",
    "attention_bias",
    "rope_parameters",
    "per_layer_config",
    "final_logit_softcapping",
)


def save_assistant(
    folder: Path, model_type: str, fields: dict[str, Any], own: dict[str, Any], **text_fields: Any
) -> torch.nn.Module:
    """Saves an assistant with random weights for a target of `save_tiny(model_type, fields)`. `own`: fields outside of
    the text part. Returns transformers' model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    of_target = config_fields(model_type, fields)
    text = ASSISTANT | {name: of_target[name] for name in OF_TARGET if of_target.get(name) is not None} | text_fields
    if text.pop("per_layer_config", None):
        text["per_layer_config"] = {2: {"head_dim": 16, "num_key_value_heads": 1}}
    kind = "gemma4_unified" if "unified" in model_type else "gemma4"
    if kind == "gemma4_unified":
        text = {name: value for name, value in text.items() if "per_layer_input" not in name}
    own = {"backbone_hidden_size": 32, **own}
    config = AutoConfig.for_model(f"{kind}_assistant", text_config={"model_type": f"{kind}_text", **text}, **own)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, kind)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(99))
    save_pretrained(model, folder)
    return model


def save_pair(
    folder: Path, model_type: str, fields: dict[str, Any], own: dict[str, Any], **text_fields: Any
) -> tuple[Any, Any]:
    """Saves a model and its assistant in two folders. Returns those of transformers."""
    target = save_tiny(folder / "target", model_type, fields)
    return target, save_assistant(folder / "assistant", model_type, fields, own, **text_fields)


def make_agree(folder: Path) -> None:
    """Changes a saved pair such that most drafts are right: the next token depends above all on the last one."""
    target, own = (folder / name / "model.safetensors" for name in ("target", "assistant"))
    state = {name: tensor.clone() for name, tensor in load_file(target).items()}
    drafts = {name: tensor.clone() for name, tensor in load_file(own).items()}
    for tensors in (state, drafts):
        for name, tensor in tensors.items():
            if name.startswith("model.layers") and "post_" in name:
                tensor.fill_(0.001)
            if "layer_scalar" in name:
                tensor.fill_(1.0)
    width, hidden = state["lm_head.weight"].shape[1], drafts["pre_projection.weight"].shape[0]
    assert width == hidden, "an assistant that agrees is as wide as its target"
    drafts["pre_projection.weight"] = torch.eye(hidden, 2 * width)
    drafts["model.norm.weight"] = state["model.norm.weight"].clone()
    drafts["model.embed_tokens.weight"] = state["lm_head.weight"].clone()
    save_file(state, target, metadata={"format": "pt"})
    save_file(drafts, own, metadata={"format": "pt"})


@torch.no_grad()
def oracle_drafts(target: Any, assistant: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Logits `[count, V]` of the drafts after a text: the target has computed all tokens but the last."""
    found = target(ids[None, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    token, row = ids[-1:][None], found.hidden_states[-1][:, -1:]
    position, logits = torch.tensor([[len(ids) - 1]]), []
    for _ in range(count):
        inputs = torch.cat([target.get_input_embeddings()(token), row], -1)
        out = assistant(inputs_embeds=inputs, position_ids=position, shared_kv_states=found.shared_kv_states)
        logits.append(out.logits[0, 0])
        token, row = out.logits.argmax(-1), out.last_hidden_state
    return torch.stack(logits)


def change_config(folder: Path, text: dict[str, Any], **fields: Any) -> None:
    """Changes fields of a saved assistant's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= text
    path.write_text(json.dumps(config | fields))
