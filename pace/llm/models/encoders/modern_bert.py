"""ModernBERT: norms before branches, gates, rotations, and two of three layers with a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pace.batch import ForwardBatch
from pace.llm.models.encoders.encoder import Encoder, EncoderConfig
from pace.llm.models.encoders.heads import Head
from pace.llm.models.families.modernbert_decoder import ModernBertLayers, ModernBertLayersConfig
from pace.llm.models.model_config import choice
from pace.ops.protocol import ForwardOps, Ops


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(ModernBertLayersConfig, EncoderConfig):
    classifier_pooling: str = choice("cls", ("cls", "mean"))

    without_effect: ClassVar[dict[str, tuple]] = ModernBertLayersConfig.without_effect | {
        "decoder_bias": (True, False),
        "initializer_cutoff_factor": (2.0, 3.0, None),
        "position_embedding_type": (None, "absolute", "rope"),
    }

    def window(self, layer: int) -> int | None:
        """`local_attention` is the width of the whole window, on both sides of a token."""
        return self.local_attention // 2 + 1 if self.slides(layer) else None


class ModernBertModel(ModernBertLayers, Encoder):
    Config = ModernBertConfig
    qkv_names = ("Wqkv",)
    prefix = "model."
    outside = ("classifier.", "decoder.", "head.")
    ignored_tensors = (r".*inv_freq", r"(head|decoder)\..*")

    def __init__(self, config: ModernBertConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.make_body()
        if self.num_labels:
            self.head = Head(
                "head.dense",
                config.classifier_activation,
                "classifier",
                config.hidden_size,
                self.num_labels,
                (config.classifier_pooling,),
                self.make_norm("head.norm"),
                (config.classifier_bias, True),
            )

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> torch.Tensor:
        return self.embedding_norm(ops, self.embedding(ops, batch.tokens))
