"""Encoders and variants of their configs, made into tiny random checkpoints by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.llm.models.variants import save_pretrained

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "initializer_range": 0.02,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "MPNet": {"max_position_embeddings": 400},
    "ModernBert": {"num_hidden_layers": 5, "local_attention": 8, "pad_token_id": 0, "cls_token_id": 1},
    "NomicBert": {"type_vocab_size": 2},
    "Gte": {"type_vocab_size": 1},
    "JinaEmbeddingsV3": {"type_vocab_size": 1},
    "Gemma3Text": {
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "sliding_window": 12,
        "query_pre_attn_scalar": 10,
        "use_bidirectional_attention": True,
        "pad_token_id": 0,
    },
    "EuroBert": {"num_key_value_heads": 2, "pad_token_id": 0},
    "Ultrabert": {"num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 5},
}
"""Beginning of the names in transformers, and the fields of all its variants."""

NESTED_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
}

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("MPNet", "default", {}),
    ("MPNet", "act-eps", {"hidden_act": "relu", "layer_norm_eps": 0.1, "relative_attention_num_buckets": 40}),
    ("ModernBert", "default", {}),
    ("ModernBert", "biases", {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "norm_eps": 0.1}),
    ("ModernBert", "types-rope", {
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention",
         "sliding_attention"],
        "rope_parameters": NESTED_ROPE,
        "local_attention": 13,
        "hidden_activation": "silu",
    }),
    ("ModernBert", "all-slide", {"layer_types": ["sliding_attention"] * 5, "local_attention": 1}),
    ("NomicBert", "default", {}),
    ("NomicBert", "head_dim-theta", {
        "head_dim": 20,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
        "max_position_embeddings": 40,
    }),
    ("NomicBert", "one-type-act", {"type_vocab_size": 1, "hidden_act": "gelu"}),
    ("Gte", "default", {}),
    ("Gte", "no-types-linear", {
        "type_vocab_size": 0,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    }),
    ("Gte", "types-eps", {"type_vocab_size": 3, "layer_norm_eps": 0.1, "hidden_act": "relu"}),
    ("JinaEmbeddingsV3", "default", {}),
    ("JinaEmbeddingsV3", "act-theta", {"hidden_act": "gelu_new", "rope_parameters": {"rope_theta": 300.0}}),
    ("Gemma3Text", "default", {}),
    ("Gemma3Text", "types", {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]}),
    ("EuroBert", "default", {}),
    ("EuroBert", "bias-head_dim", {"attention_bias": True, "mlp_bias": True, "head_dim": 20, "hidden_act": "gelu"}),
    ("Ultrabert", "default", {}),
    ("Ultrabert", "nested", {"rope_parameters": NESTED_ROPE, "layer_types": ["full_attention", "sliding_attention"] * 2
     + ["sliding_attention"]}),
]  # fmt: skip

IDS = [f"{family}-{name}" for family, name, _ in VARIANTS]


def make_config(family: str, fields: dict[str, Any]):
    """Returns transformers' config of a family with these fields."""
    import transformers

    return getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | fields))


def save_tiny(folder: Path, family: str, fields: dict[str, Any], kind: str = "Model") -> torch.nn.Module:
    """Makes a random model of a kind, such as ForSequenceClassification, saves it, and returns it."""
    import transformers

    torch.manual_seed(sum(map(ord, family)))
    config = make_config(family, fields)
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    randomise(model, adds_one=family == "Gemma3Text")
    save_pretrained(model, folder)
    return model


def randomise(model: torch.nn.Module, adds_one: bool) -> None:
    """Makes all weights random, also those of norms and biases; exact in bfloat16."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                is_embedding = "embed" in name or "bias" in name
                parameter.normal_(0.0, 1.0 if is_embedding else 1.5 / parameter.shape[1] ** 0.5)
            else:
                is_around_one = "norm" in name.lower() and name.endswith("weight") and not adds_one
                parameter.normal_(1.0 if is_around_one else 0.0, 0.3)
            parameter.copy_(parameter.bfloat16())
