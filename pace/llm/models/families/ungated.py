"""Families whose MLP has no gate, with squared ReLU: Arcee's AFM, Nemotron 4 and Minitron, Jais 2, nanochat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers import HeadUnitNorm, LayerNorm, PlainMLP, RopeConfig, UnitNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, activation, count, flag, number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.ops.protocol import ForwardOps, Ops


class UngatedForCausalLM(LlamaForCausalLM):
    mlp_names: ClassVar[tuple[str, str]] = ("up_proj", "down_proj")

    def make_mlp(self, name: str) -> PlainMLP:
        config, (up, down) = self.config, self.mlp_names
        hidden, inner = config.hidden_size, config.intermediate_size
        return PlainMLP.named(f"{name}.{up}", f"{name}.{down}", hidden, inner, config.hidden_act, bias=config.mlp_bias)


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(LlamaConfig):
    hidden_size: int = count(2560)
    intermediate_size: int = count(18432)
    hidden_act: str = activation("relu2")
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(128000)
    eos_token_id: int | tuple[int, ...] | None = token_ids(128001)


class ArceeForCausalLM(UngatedForCausalLM):
    Config = ArceeConfig


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(LlamaConfig):
    vocab_size: int = count(256000)
    hidden_size: int = count(6144)
    intermediate_size: int = count(24576)
    num_attention_heads: int = count(48)
    hidden_act: str = activation("relu2")
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(2)
    eos_token_id: int | tuple[int, ...] | None = token_ids(3)

    rope_options: ClassVar[dict[str, Any]] = {"partial": True, "default_partial": 0.5}


class NemotronForCausalLM(UngatedForCausalLM):
    """Nemotron without Mamba: layer norms with weights around 0, and half of each head rotated."""

    Config = NemotronConfig

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.norm_eps, offset=1.0)


@dataclass(frozen=True, kw_only=True)
class Jais2Config(LlamaConfig):
    vocab_size: int = count(150272)
    hidden_size: int = count(3328)
    intermediate_size: int = count(26624)
    num_attention_heads: int = count(26)
    hidden_act: str = activation("relu2")
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)
    attention_bias: bool = flag(True)
    mlp_bias: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(150024)


class Jais2ForCausalLM(UngatedForCausalLM):
    Config = Jais2Config

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.layer_norm_eps)


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(LlamaConfig):
    vocab_size: int = count(50304)
    hidden_size: int = count(768)
    intermediate_size: int = count(8192)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(6)
    hidden_act: str = activation("relu2")
    final_logit_softcapping: float | None = number(15.0, 1e-6, 1e9, optional=True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return replace(read_rope(fields, head_dim, self.max_position_embeddings), backwards=True)

    @property
    def logits_softcap(self) -> float | None:
        return self.final_logit_softcapping


class NanoChatForCausalLM(UngatedForCausalLM):
    """nanochat: norms without weights, also of embeddings and, after their backward rotation, of heads."""

    Config = NanoChatConfig
    mlp_names = ("fc1", "fc2")
    norm_last = True

    def __init__(self, config: NanoChatConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.first_norm = self.make_norm("")

    def make_norm(self, name: str) -> UnitNorm:
        return UnitNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def make_head_norm(self, name: str, num_heads: int) -> HeadUnitNorm:
        return HeadUnitNorm(self.config.head_dim, self.config.rms_norm_eps)

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        return self.first_norm(ops, super().embed(ops, batch))
