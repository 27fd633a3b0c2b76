"""Every encoder and config variant that is tested, made into a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

VOCABULARY = 97
MAX_POSITIONS = 80

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": MAX_POSITIONS,
}
"""Fields of every config, unless a variant says otherwise."""
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 56}


class Variant(NamedTuple):
    """An architecture of transformers, and fields of its config."""

    architecture: str
    fields: dict[str, Any] = {}


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
    "roberta": Variant("RobertaModel", ROBERTA),
    "roberta-classifier": Variant("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 2}),
    "roberta-masked-pad-5": Variant("RobertaForMaskedLM", {**ROBERTA, "pad_token_id": 5, "hidden_act": "relu"}),
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
