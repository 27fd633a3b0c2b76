"""Every encoder and config variant that is tested, made into a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

VOCABULARY = 97
MAX_POSITIONS = 80

BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 56, "max_position_embeddings": MAX_POSITIONS,
}  # fmt: skip
"""Fields of every config, unless a variant says otherwise."""
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 56}
MODERN = {"num_hidden_layers": 5, "local_attention": 8, "pad_token_id": 0}
EURO = {"num_key_value_heads": 2, "pad_token_id": 0}
ULTRA = {"num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 5}
GEMMA = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_key_value_heads": 1,
    "head_dim": 12, "sliding_window": 12, "query_pre_attn_scalar": 10, "use_bidirectional_attention": True,
    "pad_token_id": 0,
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "sliding_attention"]


class Variant(NamedTuple):
    """An architecture of transformers, and fields of its config."""

    architecture: str
    fields: dict[str, Any] = {}


def classifier(family: str, fields: dict[str, Any], **more: Any) -> Variant:
    return Variant(f"{family}ForSequenceClassification", {"num_labels": 3, **fields, **more})


VARIANTS: dict[str, Variant] = {
    "bert": Variant("BertModel"),
    "bert-gelu_new-3-types": Variant("BertModel", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "bert-classifier": Variant("BertForSequenceClassification", {"num_labels": 3}),
    "bert-1-label": Variant("BertForSequenceClassification", {"num_labels": 1, "num_attention_heads": 2}),
    "bert-masked": Variant("BertForMaskedLM"),
    "camembert": Variant("CamembertModel", ROBERTA),
    "distilbert": Variant("DistilBertModel", DISTIL),
    "distilbert-classifier": Variant("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 4}),
    "distilbert-masked": Variant("DistilBertForMaskedLM", {**DISTIL, "sinusoidal_pos_embds": True}),
    "electra": Variant("ElectraModel", {"embedding_size": 20}),
    "electra-classifier": Variant("ElectraForSequenceClassification", {"embedding_size": 32}),
    "electra-pretraining": Variant("ElectraForPreTraining", {"embedding_size": 20}),
    "eurobert": Variant("EuroBertModel", EURO),
    "eurobert-bias-head_dim": Variant(
        "EuroBertModel", {**EURO, "attention_bias": True, "mlp_bias": True, "head_dim": 12, "hidden_act": "gelu"}
    ),
    "eurobert-masked": Variant("EuroBertForMaskedLM", EURO),
    "eurobert-late": classifier("EuroBert", EURO),
    "eurobert-bos": classifier("EuroBert", EURO, classifier_pooling="bos"),
    "eurobert-mean": classifier("EuroBert", EURO, classifier_pooling="mean"),
    "embedding-gemma": Variant("Gemma3TextModel", GEMMA),
    "embedding-gemma-ropes": Variant("Gemma3TextModel", {**GEMMA, "rope_parameters": ROPES, "sliding_window": 8}),
    "gte": Variant("GteModel"),
    "gte-without-types": Variant(
        "GteModel",
        {"type_vocab_size": 0, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "gte-3-types-relu": Variant("GteModel", {"type_vocab_size": 3, "layer_norm_eps": 0.1, "hidden_act": "relu"}),
    "gte-masked": Variant("GteForMaskedLM"),
    "gte-classifier": classifier("Gte", {"type_vocab_size": 2}),
    "jina": Variant("JinaEmbeddingsV3Model"),
    "jina-theta-gelu_new": Variant(
        "JinaEmbeddingsV3Model",
        {"hidden_act": "gelu_new", "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "jina-masked": Variant("JinaEmbeddingsV3ForMaskedLM"),
    "jina-classifier": classifier("JinaEmbeddingsV3", {}),
    "modernbert": Variant("ModernBertModel", MODERN),
    "modernbert-biases": Variant(
        "ModernBertModel", {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "norm_eps": 0.1}
    ),
    "modernbert-types-ropes": Variant(
        "ModernBertModel",
        {
            **MODERN,
            "layer_types": TYPES,
            "rope_parameters": ROPES,
            "local_attention": 13,
            "hidden_activation": "silu",
        },
    ),
    "modernbert-window-1": Variant(
        "ModernBertModel", {**MODERN, "layer_types": ["sliding_attention"] * 5, "local_attention": 1}
    ),
    "modernbert-masked": Variant("ModernBertForMaskedLM", MODERN),
    "modernbert-cls": classifier("ModernBert", MODERN, classifier_activation="relu", norm_bias=True),
    "modernbert-mean": classifier("ModernBert", MODERN, classifier_pooling="mean", classifier_bias=True),
    "mpnet": Variant("MPNetModel"),
    "mpnet-relu-40-buckets": Variant(
        "MPNetModel", {"hidden_act": "relu", "layer_norm_eps": 0.1, "relative_attention_num_buckets": 40}
    ),
    "mpnet-masked": Variant("MPNetForMaskedLM", {"pad_token_id": 3}),
    "mpnet-classifier": classifier("MPNet", {}),
    "nomic": Variant("NomicBertModel"),
    "nomic-head_dim-dynamic": Variant(
        "NomicBertModel",
        {
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
            "max_position_embeddings": 40,
        },
    ),
    "nomic-1-type-gelu": Variant("NomicBertModel", {"type_vocab_size": 1, "hidden_act": "gelu"}),
    "nomic-masked": Variant("NomicBertForMaskedLM"),
    "nomic-classifier": classifier("NomicBert", {}),
    "roberta": Variant("RobertaModel", ROBERTA),
    "roberta-classifier": Variant("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 2}),
    "roberta-masked-pad-5": Variant("RobertaForMaskedLM", {**ROBERTA, "pad_token_id": 5, "hidden_act": "relu"}),
    "ultrabert": Variant("UltrabertModel", ULTRA),
    "ultrabert-types-ropes": Variant("UltrabertModel", {**ULTRA, "layer_types": TYPES, "rope_parameters": ROPES}),
    "ultrabert-cls": classifier("Ultrabert", ULTRA),
    "ultrabert-mean": classifier("Ultrabert", ULTRA, classifier_pooling="mean"),
    "xlm-roberta": Variant("XLMRobertaModel", ROBERTA),
    "xlm-roberta-classifier": Variant("XLMRobertaForSequenceClassification", {**ROBERTA, "num_labels": 1}),
}


def save_encoder(folder: Path, variant: Variant) -> Any:
    """Makes the checkpoint of a variant. Returns transformers' model in float32. All weights are random, so that none
    of them is without effect."""
    import transformers

    kind = getattr(transformers, variant.architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**BASE | variant.fields, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.0 if "embeddings." in name else 0.3
            parameter.normal_(0.0, spread)
            if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    model.save_pretrained(folder)
    return model
