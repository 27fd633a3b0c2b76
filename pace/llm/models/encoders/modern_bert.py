"""ModernBERT: norms before branches, gates, rotations, and two of three layers with a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import (
    Attention,
    Block,
    Embedding,
    GatedLinear,
    GatedMLP,
    LayerNorm,
    Linear,
    NoNorm,
    RopeConfig,
    Rotary,
)
from pace.llm.models.encoders.encoder import Encoder, EncoderConfig
from pace.llm.models.encoders.heads import Head
from pace.llm.models.layer_types import FULL, SLIDING, check_layer_types, first_of_each, layer_types
from pace.llm.models.model_config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    check_divides,
    checked_head_dim,
    choice,
    count,
    flag,
    number,
    token_ids,
)
from pace.llm.models.rope_config import fields_of_layers, read_rope
from pace.ops.protocol import ForwardOps, Ops

DEFAULT_THETA = {FULL: 160000.0, SLIDING: 10000.0}
OLD_THETA = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
"""Names of the bases before transformers 5."""


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    vocab_size: int = count(50368)
    hidden_size: int = count(768)
    intermediate_size: int = count(1152)
    num_hidden_layers: int = count(22, MAX_LAYERS)
    num_attention_heads: int = count(12)
    hidden_activation: str = activation("gelu")
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    norm_eps: float = number(1e-5, 0.0, 1.0)
    norm_bias: bool = flag(False)
    attention_bias: bool = flag(False)
    mlp_bias: bool = flag(False)
    global_attn_every_n_layers: int = count(3, MAX_LAYERS)
    layer_types: tuple[str, ...] | None = layer_types()
    local_attention: int = count(128, MAX_POSITIONS)
    classifier_pooling: str = choice("cls", ("cls", "mean"))
    classifier_bias: bool = flag(False)
    classifier_activation: str = activation("gelu")
    pad_token_id: int | tuple[int, ...] | None = token_ids(50283)
    bos_token_id: int | tuple[int, ...] | None = token_ids(50281)
    eos_token_id: int | tuple[int, ...] | None = token_ids(50282)
    head_dim: int = 0
    ropes: tuple[RopeConfig, RopeConfig] | None = None
    """Rotations of the layers without a window, and with one."""

    also_read: ClassVar[frozenset[str]] = frozenset({"rope_parameters", "rope_scaling", *OLD_THETA.values()})
    without_effect: ClassVar[dict[str, tuple]] = {
        "decoder_bias": (True, False),
        "deterministic_flash_attn": (True, False),
        "initializer_cutoff_factor": (2.0, 3.0, None),
        "layer_norm_eps": (1e-5,),
        "position_embedding_type": (None, "absolute", "rope"),
        "reference_compile": (None, True, False),
        "repad_logits_with_grad": (True, False),
        "sparse_pred_ignore_index": (-100,),
        "sparse_prediction": (True, False),
    }

    def check(self) -> None:
        check_divides(self, "num_attention_heads", "hidden_size")
        check_layer_types(self.layer_types, self.num_hidden_layers)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        head_dim = checked_head_dim(self.hidden_size // self.num_attention_heads)
        types = self.layer_types or first_of_each(self.global_attn_every_n_layers, self.num_hidden_layers)
        ropes = tuple(self.read_rope(kind, fields, head_dim) for kind in (FULL, SLIDING))
        return super().derived(fields) | {"head_dim": head_dim, "layer_types": types, "ropes": ropes}

    def read_rope(self, kind: str, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        """Returns the rotation of a kind of layers."""
        own = fields_of_layers(fields, kind, OLD_THETA[kind])
        return read_rope(own, head_dim, self.max_position_embeddings, default_theta=DEFAULT_THETA[kind])

    def window(self, layer: int) -> int | None:
        """`local_attention` is the width of the whole window, on both sides of a token."""
        return self.local_attention // 2 + 1 if self.slides(layer) else None

    def slides(self, layer: int) -> bool:
        """True if a layer has a window."""
        return self.layer_types[layer] == SLIDING


class ModernBertModel(Encoder):
    Config = ModernBertConfig
    prefix = "model."
    outside = ("classifier.", "decoder.", "head.")
    ignored_tensors = (r".*inv_freq", r"(head|decoder)\..*")

    def __init__(self, config: ModernBertConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        hidden = config.hidden_size
        self.rotaries = tuple(Rotary(rope, table) for table, rope in enumerate(config.ropes))
        self.embedding = Embedding("model.embeddings.tok_embeddings", config.vocab_size, hidden)
        self.embedding_norm = self.make_norm("model.embeddings.norm")
        self.layers = [self.make_layer(f"model.layers.{i}", i) for i in range(config.num_hidden_layers)]
        self.final_norm = self.make_norm("model.final_norm")
        if self.num_labels:
            self.head = Head(
                "head.dense",
                config.classifier_activation,
                "classifier",
                hidden,
                self.num_labels,
                (config.classifier_pooling,),
                self.make_norm("head.norm"),
                (config.classifier_bias, True),
            )

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.norm_eps, bias=self.config.norm_bias)

    def make_layer(self, name: str, index: int) -> Block:
        config = self.config
        hidden, inner, heads, dim = (
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.head_dim,
        )
        attention = Attention(
            Linear({f"{name}.attn.Wqkv": 3 * hidden}, hidden, config.attention_bias),
            Linear({f"{name}.attn.Wo": hidden}, hidden, config.attention_bias),
            heads,
            Positions(heads, dim, dim, config.window(index)),
            self.rotaries[config.slides(index)],
        )
        # The first half of Wi is activated.
        mlp = GatedMLP(
            GatedLinear({f"{name}.mlp.Wi": 2 * inner}, hidden, config.mlp_bias),
            Linear({f"{name}.mlp.Wo": hidden}, inner, config.mlp_bias),
            config.hidden_activation,
        )
        # The embeddings are normalised already.
        first = self.make_norm(f"{name}.attn_norm") if index else NoNorm()
        return Block(first, attention, self.make_norm(f"{name}.mlp_norm"), mlp)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> torch.Tensor:
        return self.embedding_norm(ops, self.embedding(ops, batch.tokens))
