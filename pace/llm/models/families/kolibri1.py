"""Kolibri 1: norms before and after each branch, normalised heads, and experts whose biased logits are compared. Four
of five layers have a window; the others do not rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.exaone4 import PatternConfig, pattern
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, biased_mixture
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class Kolibri1Config(MixtureConfig, PatternConfig):
    vocab_size: int = count(128000)
    hidden_size: int = count(2560)
    num_hidden_layers: int = count(50, MAX_LAYERS)
    num_attention_heads: int = count(48)
    num_key_value_heads: int | None = count(4, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(262144, MAX_POSITIONS)
    sliding_window: int | None = count(513, MAX_POSITIONS, optional=True)
    sliding_window_pattern: int | str | None = pattern(5)
    num_experts: int = count(384, MAX_EXPERTS)
    num_experts_per_tok: int = count(6, MAX_EXPERTS)
    moe_intermediate_size: int = count(512)
    shared_expert_intermediate_size: int = count(512)
    norm_topk_prob: bool = flag(False)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    scores: ClassVar[str] = "sigmoid_of_chosen"

    @property
    def shared_width(self) -> int:
        return self.shared_expert_intermediate_size

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (None, False), "mlp_bias": (None, False)}


class Kolibri1ForCausalLM(LlamaForCausalLM):
    Config = Kolibri1Config
    post_norm_names = ("post_self_attn_layernorm", "post_mlp_layernorm")
    head_norm = True
    other_names: ClassVar[dict[str, str]] = {
        r"\.moe\.router\.expert_bias$": ".mlp.gate.e_score_correction_bias",
        r"\.post_attn_norm\.": ".post_self_attn_layernorm.",
        r"\.post_ffn_norm\.": ".post_mlp_layernorm.",
    }

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
