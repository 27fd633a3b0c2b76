"""Flint: experts weighed by sigmoids next to a shared MLP, normalised heads, and sinks. Only layers with a window
rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import Attention, MixtureOfExperts, Vectors
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import layer_numbers, mixture, shared_mlp
from pace.llm.models.families.qwen2_moe import QwenMixtureConfig
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.layer_types import FULL, SLIDING
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class FlintConfig(QwenMixtureConfig, WindowedConfig):
    vocab_size: int = count(150144)
    hidden_size: int = count(2048)
    intermediate_size: int = count(6144)
    num_hidden_layers: int = count(49, MAX_LAYERS)
    num_key_value_heads: int | None = count(4, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(262144, MAX_POSITIONS)
    sliding_window: int | None = count(513, MAX_POSITIONS, optional=True)
    num_experts: int = count(256, MAX_EXPERTS)
    num_experts_per_tok: int = count(6, MAX_EXPERTS)
    moe_intermediate_size: int = count(512)
    shared_expert_intermediate_size: int = count(1024)
    norm_topk_prob: bool = flag(True)
    mlp_only_layers: tuple[int, ...] = layer_numbers((0, 1))
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (None, False)}
    only_windows_rotate: ClassVar[bool] = True
    scores: ClassVar[str] = "sigmoid"

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        last = self.num_hidden_layers - 1
        is_full = (layer < 2 or layer % 4 == 1 or layer == last for layer in range(self.num_hidden_layers))
        return self.layer_types or tuple(FULL if full else SLIDING for full in is_full)


class FlintForCausalLM(LlamaForCausalLM):
    Config = FlintConfig
    head_norm = True
    other_names: ClassVar[dict[str, str]] = {r"\.self_attn\.softmax_offset$": ".self_attn.sinks"}

    def make_attention(self, name: str, index: int) -> Attention:
        attention = super().make_attention(name, index)
        attention.sinks = Vectors({f"{name}.sinks": self.config.num_attention_heads})
        return attention

    def make_experts(self, name: str) -> MixtureOfExperts:
        shared = shared_mlp(self.config, f"{name}.shared_expert", self.config.shared_expert_intermediate_size)
        return mixture(self.config, name, self.config.moe_intermediate_size, shared=shared)
