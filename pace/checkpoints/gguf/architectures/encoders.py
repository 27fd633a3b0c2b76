"""Architectures of GGUF files of encoders.

Files of BERT also hold RoBERTa, XLM-R and DistilBERT. Their position tables begin with the row of the first
token, so all of them count positions from 0. DistilBERT has no token types, which is its only difference from a BERT.

The converter drops the pooler of a BERT. A cross-encoder without one is refused: its scores would be wrong. The
classifiers of RoBERTa and XLM-R are complete, and are that of a BERT under other names."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.architecture import Architecture, Change, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.changes import BOTH_BIASES, alternating, rotations
from pace.checkpoints.gguf.architectures.encoder_names import (
    BERT,
    CLASSIFIER,
    DISTILBERT,
    JINA_V3,
    MODERN_BERT,
    NOMIC_BERT,
    NOMIC_BERT_MOE,
)
from pace.checkpoints.gguf.architectures.forms import PLUS_ONE
from pace.checkpoints.gguf.architectures.names import GEMMA

UNROTATED = ("num_key_value_heads", "head_dim", "rope_theta", "is_causal")
"""Fields that an encoder with learned positions does not have."""
ROTATED = ("num_key_value_heads", "head_dim", "is_causal")
MEAN, CLS, RANK = 1, 2, 4
"""Values of pooling_type and classifier.pooling_type."""


def classified(stem: str) -> Change:
    """Returns a change that names the class `{stem}Model`, or the one with a classifier and its labels."""

    def add(fields: Fields, keys: Keys) -> Fields:
        dense, output = (keys.shapes.get(f"{name}.weight") for name in CLASSIFIER[stem])
        if dense is None and output is None:
            return fields | without_classifier(stem, keys)
        if dense is None or output is None or len(output) != 2:
            raise keys.refused(
                "the file has a classifier without the matrix before it (cls.weight and cls.output.weight are needed), "
                "which llama.cpp's converter drops for some models; its scores would be wrong. Use the checkpoint that "
                "it was made from"
            )
        count = output[0]
        labels = keys.texts("classifier.output_labels") or [f"LABEL_{index}" for index in range(min(count, 1 << 16))]
        if len(labels) != count:
            raise ValueError(
                f"{keys.path}: {keys.prefix}classifier.output_labels has {len(labels)} labels, and cls.output.weight "
                f"{count} rows"
            )
        return fields | {
            "architectures": [f"{stem}ForSequenceClassification"],
            "id2label": {str(index): label for index, label in enumerate(labels)},
        }

    return add


def without_classifier(stem: str, keys: Keys) -> Fields:
    """The class of a file without a classifier. Raises ValueError if the file says that its model ranks."""
    if keys.integer("pooling_type") == RANK:
        raise ValueError(f"{keys.path}: {keys.prefix}pooling_type = {RANK} (rank), but the file has no classifier")
    return {"architectures": [f"{stem}Model"]}


def bert(fields: Fields, keys: Keys) -> Fields:
    types = keys.shapes.get("embeddings.token_type_embeddings.weight", (0,))
    return classified("Bert")(fields | {"type_vocab_size": types[0]}, keys)


def distilbert(fields: Fields, keys: Keys) -> Fields:
    renamed = {
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
    }  # fmt: skip
    found = classified("DistilBert")(fields, keys)
    kept = {name: value for name, value in found.items() if name not in renamed.values()}
    return kept | {name: fields[other] for name, other in renamed.items()}


def typed(stem: str) -> Change:
    """Returns a change for rotated encoders with token types."""

    def add(fields: Fields, keys: Keys) -> Fields:
        types = keys.shapes.get("embeddings.token_type_embeddings.weight", (0,))
        return fields | without_classifier(stem, keys) | {"type_vocab_size": types[0]}

    return add


def modern_bert(fields: Fields, keys: Keys) -> Fields:
    """Adds the activation, the two rotations, and the rows that the classifier reads. The defaults are those of
    llama.cpp: the mean of all rows, and one base of rotation for all layers."""
    local = keys.number("rope.freq_base_swa", fields["rope_theta"])
    pooling = keys.integer("classifier.pooling_type", MEAN)
    if pooling not in (MEAN, CLS):
        raise keys.refused(f"{keys.prefix}classifier.pooling_type = {pooling} is not implemented; {MEAN} and {CLS} are")
    found = rotations(classified("ModernBert")(fields, keys), local) | {
        "hidden_activation": keys.text("hidden_activation", "gelu"),
        "classifier_pooling": "mean" if pooling == MEAN else "cls",
        "classifier_bias": keys.has_tensor("head.dense.bias"),
    }
    window = found.pop("sliding_window", None)
    return found if window is None else found | {"local_attention": window}


def embedding_gemma(fields: Fields, keys: Keys) -> Fields:
    """Adds what makes a Gemma 3 an encoder. The window is that of config.json, the width of both sides together."""
    return rotations(fields, keys.number("rope.freq_base_swa", 10000.0)) | {
        **without_classifier("Gemma3Text", keys),
        "query_pre_attn_scalar": fields["head_dim"],
        "use_bidirectional_attention": True,
    }


def eurobert(fields: Fields, keys: Keys) -> Fields:
    return fields | without_classifier("EuroBert", keys)


ENCODERS = (
    Architecture(
        "bert", "bert", marker="token_types.weight", names=BERT, layer_norms="layer_norm_eps", convert=bert,
        absent=UNROTATED,
    ),
    Architecture(
        "bert", "distilbert", names=DISTILBERT, layer_norms="layer_norm_eps", convert=distilbert,
        absent=(*UNROTATED, "layer_norm_eps"),
    ),
    Architecture(
        "nomic-bert", "nomic_bert", names=NOMIC_BERT, layer_norms="layer_norm_eps", convert=typed("NomicBert"),
        absent=ROTATED,
    ),
    Architecture(
        "nomic-bert-moe", "nomic_bert", names=NOMIC_BERT_MOE, layer_norms="layer_norm_eps", convert=typed("NomicBert"),
        absent=ROTATED, defaults={"activation_function": "gelu"}, present={
            "qkv_proj_bias": "blk.0.attn_qkv.bias", "mlp_fc1_bias": "blk.0.ffn_up.bias",
            "mlp_fc2_bias": "blk.0.ffn_down.bias",
        },
        keys={
            "moe_every_n_layers": Key("moe_every_n_layers", 0), "moe_top_k": Key("expert_used_count"),
            "num_experts": Key("expert_count"),
        },
    ),
    Architecture(
        "jina-bert-v3", "jina_embeddings_v3", names=JINA_V3, layer_norms="layer_norm_eps",
        convert=typed("JinaEmbeddingsV3"), absent=ROTATED,
    ),
    Architecture(
        "modern-bert", "modernbert", names=MODERN_BERT, layer_norms="norm_eps", convert=modern_bert,
        window=alternating(3, full_first=True), absent=ROTATED, present={
            "attention_bias": "blk.0.attn_qkv.bias", "mlp_bias": "blk.0.ffn_up.bias",
            "norm_bias": "token_embd_norm.bias",
        },
    ),
    Architecture(
        "gemma-embedding", "gemma3_text", names=GEMMA, forms={"norm.weight": PLUS_ONE},
        window=alternating(6), convert=embedding_gemma, absent=("is_causal",),
    ),
    Architecture("eurobert", "eurobert", present=BOTH_BIASES, convert=eurobert, absent=("is_causal",)),
)  # fmt: skip
