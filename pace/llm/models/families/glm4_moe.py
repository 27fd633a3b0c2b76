"""GLM-4-MoE (4.5, 4.6 and their Air): experts chosen by biased sigmoids, in groups, and a shared MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import (
    FeedForward,
    HeadNorm,
    MixtureOfExperts,
    NoHeadNorm,
    RopeConfig,
    RouterLinear,
    Vectors,
    expert_stacks,
)
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, shared_mlp
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(MixtureConfig, LlamaConfig):
    vocab_size: int = count(151552)
    hidden_size: int = count(4096)
    intermediate_size: int = count(10944)
    num_hidden_layers: int = count(46, MAX_LAYERS)
    num_attention_heads: int = count(96)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    use_qk_norm: bool = flag(False)
    num_experts: int = count(128, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(1408)
    n_shared_experts: int = count(1)
    routed_scaling_factor: float = number(1.0, -1e9, 1e9)
    n_group: int = count(1, MAX_EXPERTS)
    topk_group: int = count(1, MAX_EXPERTS)
    first_k_dense_replace: int = count(1, MAX_LAYERS, minimum=0)
    norm_topk_prob: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    aliases: ClassVar[dict[str, str]] = {"n_routed_experts": "num_experts", "num_local_experts": "num_experts"}
    only_here: ClassVar[dict[str, tuple]] = {
        "mlp_bias": (False,),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
    }
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"num_nextn_predict_layers", "num_mtp_layers"}
    output_bias: ClassVar[bool] = False
    floors_head_dim: ClassVar[bool] = True

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return read_rope(fields, head_dim, self.max_position_embeddings, partial=True, default_partial=0.5)

    @property
    def router(self) -> Router:
        return Router(
            self.num_experts,
            self.num_experts_per_tok,
            "sigmoid",
            normalise=self.norm_topk_prob,
            eps=1e-20,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            kept_groups=self.topk_group,
            group_score="top2",
        )


class Glm4MoeForCausalLM(LlamaForCausalLM):
    Config = Glm4MoeConfig
    num_further_layers = 1

    def make_head_norm(self, name: str, num_heads: int) -> HeadNorm | NoHeadNorm:
        config = self.config
        return HeadNorm(name, config.head_dim, config.rms_norm_eps) if config.use_qk_norm else NoHeadNorm()

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config, mlp = self.config, f"{name}.mlp"
        if index < config.first_k_dense_replace:
            return super().make_feed_forward(name, index)
        count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        return MixtureOfExperts(
            RouterLinear({f"{mlp}.gate": count}, hidden),
            config.router,
            *expert_stacks(f"{mlp}.experts", count, hidden, inner),
            config.hidden_act,
            choice_bias=Vectors({f"{mlp}.gate.e_score_correction_bias": count}),
            shared=shared_mlp(f"{mlp}.shared_experts", hidden, inner * config.n_shared_experts, config.hidden_act),
        )
