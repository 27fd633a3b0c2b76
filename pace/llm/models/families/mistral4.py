"""The text part of Mistral Small 4: latent attention, whose queries grow with the position. Experts are those of
DeepSeek-V2, whose groups are chosen by their two best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.families.deepseek_v2 import DeepseekConfig, DeepseekV2ForCausalLM
from pace.llm.models.families.ministral3 import PERIOD, SCALE, GrowingQueries, GrowingQueriesConfig
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids
from pace.ops.experts import MAX_EXPERTS, Router

SHARE = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(GrowingQueriesConfig, DeepseekConfig):
    vocab_size: int = count(131072)
    intermediate_size: int = count(12288)
    moe_intermediate_size: int = count(2048)
    num_hidden_layers: int = count(36, MAX_LAYERS)
    n_shared_experts: int = count(1)
    num_experts: int = count(128, MAX_EXPERTS)
    num_experts_per_tok: int | None = count(4, MAX_EXPERTS, optional=True)
    kv_lora_rank: int = count(256, MAX_HEAD_DIM)
    q_lora_rank: int | None = count(1024, optional=True)
    qk_nope_head_dim: int = count(64)
    n_group: int | None = count(1, MAX_EXPERTS, optional=True)
    topk_group: int | None = count(1, MAX_EXPERTS, optional=True)
    max_position_embeddings: int = count(1048576, MAX_POSITIONS)
    rope_interleave: bool = flag(True)
    norm_topk_prob: bool = flag(True)
    num_nextn_predict_layers: int = count(0, MAX_LAYERS, minimum=0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(11)

    only_here: ClassVar[dict[str, tuple]] = {"scoring_func": (None, "softmax"), "topk_method": (None,)}
    without_effect: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,), "moe_layer_freq": (1,)}
    published_rope: ClassVar[dict[str, Any]] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        PERIOD: 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        SCALE: 0.1,
    }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        """The share of a query that rotates follows from its two parts."""
        source, rope = self.rope_of(fields)
        for place in (fields, rope):
            if place.get(SHARE) not in (None, self.qk_rope_head_dim / self.query_dim):
                raise NotImplementedError(
                    f"config.json: {SHARE} = {place[SHARE]} is not implemented for Mistral4; implemented: "
                    "qk_rope_head_dim / (qk_nope_head_dim + qk_rope_head_dim)"
                )
        kept = {name: value for name, value in fields.items() if name != SHARE}
        return super().read_rope(
            kept | {source: {name: value for name, value in rope.items() if name != SHARE}}, head_dim
        )

    @property
    def rotates_neighbours(self) -> bool:
        return self.rope_interleave

    @property
    def query_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def router(self) -> Router:
        return Router(
            self.num_experts,
            self.chosen,
            normalise=self.norm_topk_prob,
            eps=1e-20,
            scale=self.routed_scaling_factor,
            groups=self.n_group or 1,
            kept_groups=self.topk_group or 1,
            group_score="top2",
        )


class Mistral4ForCausalLM(GrowingQueries, DeepseekV2ForCausalLM):
    Config = Mistral4Config
