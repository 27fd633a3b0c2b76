"""EuroBERT: the layers of Llama, in which tokens also see those after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.batch import ForwardBatch
from pace.llm.models.encoders.encoder import Encoder, EncoderConfig
from pace.llm.models.encoders.heads import Head, LateHead
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, choice, count, number, token_ids
from pace.ops.protocol import ForwardOps, Ops


@dataclass(frozen=True, kw_only=True)
class EuroBertConfig(LlamaConfig, EncoderConfig):
    vocab_size: int = count(128256)
    hidden_size: int = count(768)
    intermediate_size: int = count(3072)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(128000)
    eos_token_id: int | tuple[int, ...] | None = token_ids(128001)
    pad_token_id: int | tuple[int, ...] | None = token_ids(128001)
    classifier_pooling: str = choice("late", ("bos", "mean", "late"))

    only_here: ClassVar[dict[str, tuple]] = {"is_causal": (None, False)}

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return LlamaConfig.derived(self, fields) | EncoderConfig.derived(self, fields)


class DecoderLayers(Encoder):
    """An encoder that consists of the parts of a causal model, `Decoder`."""

    Decoder: ClassVar[type[LlamaForCausalLM]] = LlamaForCausalLM
    prefix = "model."

    def __init__(self, config: EuroBertConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        decoder = self.Decoder(config, dtype, ops)
        self.embedding_scale = decoder.embedding_scale
        self.rotaries = decoder.rotaries
        self.embedding = decoder.embedding
        self.layers = decoder.layers
        self.final_norm = decoder.final_norm

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> torch.Tensor:
        x = self.embedding(ops, batch.tokens)
        if self.embedding_scale != 1.0:
            ops.scale_(x, self.embedding_scale)
        return x


class EuroBertModel(DecoderLayers):
    Config = EuroBertConfig
    outside = ("classifier.", "dense.", "lm_head.")
    ignored_tensors = (*LlamaForCausalLM.ignored_tensors, r"lm_head\..*")

    def __init__(self, config: EuroBertConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        if self.num_labels:
            # Late: the mean of the logits of all tokens.
            kind, pooling = {"bos": (Head, "cls"), "mean": (Head, "mean"), "late": (LateHead, "mean")}[
                config.classifier_pooling
            ]
            self.head = kind("dense", "gelu", "classifier", config.hidden_size, self.num_labels, (pooling,))
