"""Names of tensors of encoders in GGUF files and on the Hub."""

from __future__ import annotations

from collections.abc import Mapping

from pace.checkpoints.gguf.architectures.names import TensorNames

CLASSIFIER = {
    "Bert": ("pooler.dense", "classifier"),
    "DistilBert": ("pre_classifier", "classifier"),
    "ModernBert": ("head.dense", "classifier"),
}
"""The matrices of a classifier, in order, of `{key}ForSequenceClassification`."""


def encoder_names(stem: str, layers: str, inner: Mapping[str, str], outer: Mapping[str, str]) -> TensorNames:
    """Names of an encoder, and of its classifier if it may have one."""
    dense, output = CLASSIFIER.get(stem, ("cls", "cls.output"))
    return TensorNames({**outer, "cls": dense, "cls.output": output}, layers, inner)


BERT_EMBEDDINGS = {"token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings"}
BERT = encoder_names(
    "Bert",
    "encoder.layer",
    {
        **{f"attn_{part[0]}": f"attention.self.{part}" for part in ("query", "key", "value")},
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    {
        **BERT_EMBEDDINGS,
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    },
)
DISTILBERT = encoder_names(
    "DistilBert",
    "transformer.layer",
    {
        **{f"attn_{part}": f"attention.{part}_lin" for part in ("q", "k", "v")},
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    },
    BERT.outer,
)
NOMIC_BERT = encoder_names(
    "NomicBert",
    "encoder.layers",
    {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
    {**BERT_EMBEDDINGS, "token_embd_norm": "emb_ln"},
)
NOMIC_BERT_MOE = NOMIC_BERT.but(
    {
        "ffn_up": "mlp.fc1",
        "ffn_gate_inp": "mlp.router.layer",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)
JINA_V3 = NOMIC_BERT.but({"attn_qkv": "mixer.Wqkv", "attn_output": "mixer.out_proj", "ffn_up": "mlp.fc1"})
MODERN_BERT = encoder_names(
    "ModernBert",
    "layers",
    {
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "cls.norm": "head.norm",
    },
)
