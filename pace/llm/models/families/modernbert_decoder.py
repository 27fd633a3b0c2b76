"""Decoders of ModernBERT's form, such as Ettin. They have a norm after the embedding, gated MLPs, and a product before
the LM head; two of three layers have a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

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
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.equal_heads import EqualHeadsConfig
from pace.llm.models.families.llama import parts
from pace.llm.models.layer_types import FULL, SLIDING, check_layer_types, first_of_each, layer_types
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, flag, number, token_ids
from pace.llm.models.rope_config import fields_of_layers, longest_sequence, read_rope
from pace.ops.protocol import ForwardOps, Ops

DEFAULT_THETA = {FULL: 160000.0, SLIDING: 10000.0}
OLD_THETA = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
"""Names of the bases before transformers 5."""


@dataclass(frozen=True, kw_only=True)
class ModernBertLayersConfig(EqualHeadsConfig):
    """Fields that decoders and encoders have in common."""

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
    classifier_bias: bool = flag(False)
    classifier_activation: str = activation("gelu")
    global_attn_every_n_layers: int = count(3, MAX_LAYERS)
    layer_types: tuple[str, ...] | None = layer_types()
    local_attention: int = count(128, MAX_POSITIONS)
    """Twice the number of positions that a layer with a window sees on one side."""
    pad_token_id: int | tuple[int, ...] | None = token_ids(50283)
    bos_token_id: int | tuple[int, ...] | None = token_ids(50281)
    eos_token_id: int | tuple[int, ...] | None = token_ids(50282)
    ropes: tuple[RopeConfig, RopeConfig] | None = None
    """Rotations of the layers without a window, and with one."""

    also_read: ClassVar[frozenset[str]] = frozenset({"rope_parameters", "rope_scaling", *OLD_THETA.values()})
    without_effect: ClassVar[dict[str, tuple]] = {
        "deterministic_flash_attn": (True, False),
        "layer_norm_eps": (1e-5,),
        "reference_compile": (None, True, False),
        "repad_logits_with_grad": (True, False),
        "sparse_pred_ignore_index": (-100,),
        "sparse_prediction": (True, False),
    }

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        types = self.layer_types or first_of_each(self.global_attn_every_n_layers, self.num_hidden_layers)
        ropes = tuple(self.read_rope(kind, fields) for kind in (FULL, SLIDING))
        return super().derived(fields) | {"layer_types": types, "ropes": ropes}

    def read_rope(self, kind: str, fields: dict[str, Any]) -> RopeConfig:
        """Returns the rotation of a kind of layers."""
        own = fields_of_layers(fields, kind, OLD_THETA[kind])
        return read_rope(own, self.head_dim, self.max_position_embeddings, default_theta=DEFAULT_THETA[kind])

    def slides(self, layer: int) -> bool:
        """True if a layer has a window."""
        return self.layer_types[layer] == SLIDING

    def window(self, layer: int) -> int | None:
        """Number of positions that a layer sees, the current one included; None for all."""
        raise NotImplementedError


class ModernBertLayers:
    """The parts that decoders and encoders have in common."""

    config: ModernBertLayersConfig
    qkv_names: ClassVar[tuple[str, ...]]
    """The tensors that hold the rows of queries, keys and values: three, or one for all."""

    def make_body(self) -> None:
        """Makes the embedding, the layers and the last norm."""
        config = self.config
        self.rotaries = tuple(Rotary(rope, table) for table, rope in enumerate(config.ropes))
        self.embedding = Embedding("model.embeddings.tok_embeddings", config.vocab_size, config.hidden_size)
        self.embedding_norm = self.make_norm("model.embeddings.norm")
        self.layers = [self.make_layer(f"model.layers.{i}", i) for i in range(config.num_hidden_layers)]
        self.final_norm = self.make_norm("model.final_norm")

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.norm_eps, bias=self.config.norm_bias)

    def make_layer(self, name: str, index: int) -> Block:
        config = self.config
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = config.num_attention_heads
        attention = Attention(
            Linear(parts(f"{name}.attn", self.qkv_names, [hidden] * 3), hidden, config.attention_bias),
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


@dataclass(frozen=True, kw_only=True)
class ModernBertDecoderConfig(ModernBertLayersConfig):
    decoder_bias: bool = flag(True)
    local_attention: int = count(128, MAX_POSITIONS, minimum=2)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)
    """Half of `local_attention`."""
    tie_word_embeddings: bool = flag(True)

    also_read: ClassVar[frozenset[str]] = ModernBertLayersConfig.also_read | {"initializer_cutoff_factor"}
    only_here: ClassVar[dict[str, tuple]] = {"position_embedding_type": (None, "absolute", "rope", "sans_pos")}
    without_effect: ClassVar[dict[str, tuple]] = ModernBertLayersConfig.without_effect | {
        "causal_mask": (True,),
        "classifier_pooling": ("cls", "mean"),
        "num_key_value_heads": (None,),
    }

    def check(self) -> None:
        super().check()
        if self.sliding_window not in (None, self.local_attention // 2):
            raise ValueError(
                f"config.json: sliding_window must be half of local_attention = {self.local_attention}; "
                f"got {self.sliding_window}"
            )

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return super().derived(fields) | {"sliding_window": self.local_attention // 2}

    @property
    def max_length(self) -> int:
        return longest_sequence(self.ropes[0])

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.slides(layer) else None


class ModernBertDecoderForCausalLM(ModernBertLayers, BaseModelForCausalLM):
    Config = ModernBertDecoderConfig
    qkv_names = ("q_proj", "k_proj", "v_proj")
    embedding_name = "model.embeddings.tok_embeddings"
    outside = ("lm_head.", "head.")
    text_prefixes: ClassVar[dict[str, str]] = {
        "lm_head.dense.": "head.dense.",
        "lm_head.norm.": "head.norm.",
        "decoder.": "lm_head.",
    }

    def __init__(self, config: ModernBertDecoderConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        hidden = config.hidden_size
        self.make_body()
        self.dense = Linear({"head.dense": hidden}, hidden, config.classifier_bias)
        self.head_norm = self.make_norm("head.norm")
        self.lm_head = self.make_head(hidden, config.decoder_bias)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        return self.embedding_norm(ops, super().embed(ops, batch))

    def logits(self, ops: ForwardOps, x: Tensor) -> Tensor:
        if self.lm_head is None:
            return x
        return super().logits(ops, self.head_norm(ops, self.dense(ops, x, self.config.classifier_activation)))
