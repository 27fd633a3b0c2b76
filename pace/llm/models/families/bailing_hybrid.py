"""Ling 3 and Ring 3 (`bailing_hybrid`): Kimi-Linear with bounded decays, and with gates and rotations in the layers of
latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import LatentAttention, RopeConfig
from pace.llm.models.families.bailing_moe_v2 import BailingMoeV2ForCausalLM, check_shared_width
from pace.llm.models.families.kimi_linear import KimiDeltaConfig, KimiDeltaForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class BailingHybridConfig(KimiDeltaConfig):
    vocab_size: int = count(157184)
    hidden_size: int = count(2560)
    intermediate_size: int = count(6144)
    moe_intermediate_size: int = count(768)
    num_hidden_layers: int = count(42, MAX_LAYERS)
    num_attention_heads: int = count(32)
    num_key_value_heads: int | None = count(32, optional=True)
    num_experts: int = count(512, MAX_EXPERTS)
    moe_shared_expert_intermediate_size: int | None = count(None, optional=True)
    """The same as that of `n_shared_experts`, if it is given."""
    n_group: int = count(8, MAX_EXPERTS)
    topk_group: int = count(4, MAX_EXPERTS)
    routed_scaling_factor: float = number(2.5, -1e9, 1e9)
    first_k_dense_replace: int = count(2, MAX_LAYERS, minimum=0)
    layer_group_size: int = count(6)
    """Size of a group of layers. Without `layer_types`, the last layer of each group has latent attention."""
    kda_safe_gate: bool = flag(True)
    """True if `kda_lower_bound` bounds the logarithm of a decay."""
    kda_lower_bound: float = number(-5.0, -1e6, -1e-6)
    max_position_embeddings: int = count(262144, MAX_POSITIONS)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(156895)
    pad_token_id: int | tuple[int, ...] | None = token_ids(156892)

    aliases: ClassVar[dict[str, str]] = KimiDeltaConfig.aliases | {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    only_here: ClassVar[dict[str, tuple]] = {
        "gated_attention_proj_granularity_type": (None, "head_wise"),
        "moe_router_enable_expert_bias": (None, True),
        "no_kda_lora": (None, True),
        "norm_head": (None, False),
        "score_function": (None, "sigmoid"),
        "use_bias": (None, False),
        "use_qkv_bias": (None, False),
        "use_rmsnorm": (None, True),
    }
    also_read: ClassVar[frozenset[str]] = KimiDeltaConfig.also_read | {
        "max_window_layers",
        "mtp_loss_scaling_factor",
        "rotary_dim",
        "router_dtype",
        "use_qk_norm",
    }
    low_rank: ClassVar[bool] = False

    @classmethod
    def with_one_spelling(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Adds the sizes of the delta rule. In configs of `transformers`, `head_dim` is the rotated part of a head."""
        fields = super().with_one_spelling(raw)
        fields.setdefault("linear_head_dim", fields.get("head_dim", 128))
        fields.setdefault("linear_num_heads", fields.get("num_attention_heads", 32))
        return fields

    def check(self) -> None:
        super().check()
        check_shared_width(self)

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        positions = self.max_position_embeddings
        return read_rope(fields, head_dim, positions, interleaved=self.rotates_neighbours, default_theta=6e6)

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.layer_group_size == 0

    @property
    def lower_bound(self) -> float:
        return self.kda_lower_bound if self.kda_safe_gate else 0.0


class BailingHybridForCausalLM(KimiDeltaForCausalLM):
    Config = BailingHybridConfig
    other_names: ClassVar[dict[str, str]] = BailingMoeV2ForCausalLM.other_names

    def make_attention(self, name: str, index: int) -> LatentAttention:
        attention = super().make_attention(name, index)
        attention.add_gate(f"{name}.g_proj", self.config.num_attention_heads, "sigmoid")
        return attention
