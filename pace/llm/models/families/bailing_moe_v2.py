"""Ling 2 and Ring 2 (`bailing_moe_v2`), and Sarvam 30B: GLM-4-MoE with queries, keys and values in one tensor, and
other names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pace.llm.models.families.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class FusedQkvConfig(Glm4MoeConfig):
    """What both families have in common."""

    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    num_key_value_heads: int | None = count(4, optional=True)
    use_qk_norm: bool = flag(True)
    n_shared_experts: int | None = count(1, minimum=0, optional=True)
    use_bias: bool = flag(False)
    """True if the output of attention has a bias."""

    aliases: ClassVar[dict[str, str]] = Glm4MoeConfig.aliases | {"use_qkv_bias": "attention_bias"}
    only_here: ClassVar[dict[str, tuple]] = {
        "moe_router_enable_expert_bias": (None, True),
        "norm_head": (None, False),
        "score_function": (None, "sigmoid"),
        "use_rmsnorm": (None, True),
    }
    also_read: ClassVar[frozenset[str]] = Glm4MoeConfig.also_read | {
        "max_window_layers",
        "mtp_loss_scaling_factor",
        "rotary_dim",
        "router_dtype",
    }

    @property
    def output_bias(self) -> bool:
        return self.use_bias

    @property
    def shared_width(self) -> int:
        return self.moe_intermediate_size * (self.n_shared_experts or 0)


@dataclass(frozen=True, kw_only=True)
class BailingMoeV2Config(FusedQkvConfig):
    vocab_size: int = count(157184)
    hidden_size: int = count(2048)
    intermediate_size: int = count(5120)
    num_hidden_layers: int = count(20, MAX_LAYERS)
    num_attention_heads: int = count(16)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    num_experts: int = count(256, MAX_EXPERTS)
    moe_intermediate_size: int = count(512)
    moe_shared_expert_intermediate_size: int | None = count(None, optional=True)
    """The same as that of `n_shared_experts`, if it is given."""
    n_group: int = count(8, MAX_EXPERTS)
    topk_group: int = count(4, MAX_EXPERTS)
    eos_token_id: int | tuple[int, ...] | None = token_ids(156892)
    pad_token_id: int | tuple[int, ...] | None = token_ids(156892)

    rope_options: ClassVar[dict[str, Any]] = {"partial": True, "default_theta": 6e5}

    def check(self) -> None:
        super().check()
        check_shared_width(self)

    @property
    def router(self) -> Router:
        """A single expert keeps its weight, as in the published code."""
        return replace(super().router, normalise=self.norm_topk_prob and self.num_experts_per_tok > 1)


def check_shared_width(config: Any) -> None:
    """Raises ValueError if the two fields for the width of the shared MLP contradict each other."""
    if config.shared_width and config.moe_shared_expert_intermediate_size not in (None, config.shared_width):
        raise ValueError(
            "config.json: moe_shared_expert_intermediate_size must be moe_intermediate_size * num_shared_experts, "
            f"{config.shared_width}; got {config.moe_shared_expert_intermediate_size}"
        )


class BailingMoeV2ForCausalLM(Glm4MoeForCausalLM):
    Config = BailingMoeV2Config
    qkv_names = ("query_key_value",)
    head_norm_names = ("query_layernorm", "key_layernorm")
    other_names: ClassVar[dict[str, str]] = {
        r"^(model\.)?word_embeddings\.": "model.embed_tokens.",
        r"(.*layers\.\d+)\.attention\.dense\.": r"\1.self_attn.o_proj.",
        r"(.*layers\.\d+)\.attention\.": r"\1.self_attn.",
        r"(.*\.mlp\.gate)\.expert_bias": r"\1.e_score_correction_bias",
    }


@dataclass(frozen=True, kw_only=True)
class SarvamMoEConfig(FusedQkvConfig):
    vocab_size: int = count(262144)
    intermediate_size: int = count(8192)
    num_hidden_layers: int = count(19, MAX_LAYERS)
    num_attention_heads: int = count(64)
    head_dim: int = count(64, MAX_HEAD_DIM)
    moe_intermediate_size: int = count(1024)
    num_experts_per_tok: int = count(6, MAX_EXPERTS)
    routed_scaling_factor: float = number(2.5, -1e9, 1e9)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    only_here: ClassVar[dict[str, tuple]] = {"use_bias": (False,)}
    rope_options: ClassVar[dict[str, Any]] = {"partial": True, "default_theta": 8e6}


class SarvamMoEForCausalLM(BailingMoeV2ForCausalLM):
    Config = SarvamMoEConfig
    saved_as = "Glm4MoeForCausalLM"
