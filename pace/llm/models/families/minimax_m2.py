"""MiniMax-M2 (230B-A10B): experts chosen by biased sigmoids in every layer. One norm is over all query heads together,
one over all key heads. A part of each head is rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import MixtureOfExperts, RopeConfig, WholeNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixtral import MixtralForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, biased_mixture
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.ops.experts import MAX_EXPERTS

NORMED = ("full_attention", "linear_attention", "mlp")
"""Parts with factors in MiniMax-01, which MiniMax-M2 names and does not use."""


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(BiasedChoiceConfig, LlamaConfig):
    vocab_size: int = count(200064)
    hidden_size: int = count(3072)
    moe_intermediate_size: int = count(1536)
    num_hidden_layers: int = count(62, MAX_LAYERS)
    num_attention_heads: int = count(48)
    num_key_value_heads: int = count(8)
    head_dim: int = count(128, MAX_HEAD_DIM)
    rotary_dim: int | None = count(None, MAX_HEAD_DIM, minimum=2, optional=True)
    """Rotated elements of a head, unless a part is given; null for all."""
    max_position_embeddings: int = count(196608, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    num_experts: int = count(256, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    n_shared_experts: int = count(0, 0, minimum=0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(200034)
    eos_token_id: int | tuple[int, ...] | None = token_ids(200020)

    aliases: ClassVar[dict[str, str]] = {
        "intermediate_size": "moe_intermediate_size",
        "num_local_experts": "num_experts",
        "shared_intermediate_size": "n_shared_experts",
    }
    only_here: ClassVar[dict[str, tuple]] = {
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "n_group": (1,),
        "qk_norm_type": (None, "per_layer"),
        "routed_scaling_factor": (1.0, 1),
        "topk_group": (1,),
        "use_qk_norm": (None, True),
        "use_routing_bias": (None, True),
    }
    without_effect: ClassVar[dict[str, tuple]] = {"norm_topk_prob": (True,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {
        "attn_type_list",
        "max_model_len",
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "shared_moe_mode",
        "use_mtp",
        *(f"layernorm_{part}_{end}" for part in NORMED for end in ("alpha", "beta")),
    }
    normalised_eps: ClassVar[float] = 0.0

    def check(self) -> None:
        super().check()
        if self.rotary_dim is not None and self.rotary_dim > self.head_dim:
            raise ValueError(
                f"config.json: rotary_dim must be at most head_dim, {self.head_dim}; got {self.rotary_dim}"
            )

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        part = 1.0 if self.rotary_dim is None else self.rotary_dim / head_dim
        positions = self.max_position_embeddings
        return read_rope(fields, head_dim, positions, partial=True, default_partial=part, default_theta=5e6)


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    Config = MiniMaxM2Config
    other_names: ClassVar[dict[str, str]] = MixtralForCausalLM.other_names | {
        r"(.*\.mlp)\.e_score_correction_bias": r"\1.gate.e_score_correction_bias"
    }
    ignored_tensors = (*LlamaForCausalLM.ignored_tensors, r"(model\.)?mtp\..*")

    def make_head_norm(self, name: str, num_heads: int) -> WholeNorm:
        return WholeNorm(name, num_heads * self.config.head_dim, self.config.rms_norm_eps)

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
