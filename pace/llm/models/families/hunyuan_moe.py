"""Hunyuan with experts (A13B): the dense model with a mixture and a shared MLP in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.hunyuan import HunYuanConfig, HunYuanDenseV1ForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, mixture, shared_mlp
from pace.llm.models.model_config import count
from pace.ops.experts import MAX_EXPERTS, Router

PER_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
"""Fields that may be lists with a number for each layer."""


@dataclass(frozen=True, kw_only=True)
class HunYuanMoeConfig(MixtureConfig, HunYuanConfig):
    num_experts: int = count(1, MAX_EXPERTS)
    num_experts_per_tok: int = count(1, MAX_EXPERTS)

    aliases: ClassVar[dict[str, str]] = {"moe_topk": "num_experts_per_tok", "num_local_experts": "num_experts"}
    only_here: ClassVar[dict[str, tuple]] = {
        "group_limited_greedy": (None, False),
        "moe_layer_num_skipped": (None, 0),
        "n_group": (None, False, 0, 1),
        "topk_group": (None, False, 0, 1),
        "routed_scaling_factor": (None, False, 1.0, 1),
        "position_embedding_xdrope": (None, False),
        "use_mla": (None, False),
        "use_mixed_mlp_moe": (None, True),
    }
    also_read: ClassVar[frozenset[str]] = HunYuanConfig.also_read | {
        "moe_drop_tokens", "moe_random_routing_dropped_token", "num_media_embeds", "qk_nope_head_dim",
        "qk_rope_head_dim", "skip_cls_token", "unnormed_hidden_states", "v_head_dim", "video_start_id", "video_end_id",
    }  # fmt: skip
    without_effect: ClassVar[dict[str, tuple]] = HunYuanConfig.without_effect | {
        "moe_intermediate_size": (None,),
        "num_shared_expert": (1,),
        "norm_topk_prob": (True,),
    }

    @classmethod
    def with_one_spelling(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Replaces lists of equal numbers by the number. Experts have the width `intermediate_size`, so an equal
        `moe_intermediate_size` is dropped."""
        same = {
            name: raw[name][0]
            for name in PER_LAYER
            if isinstance(raw.get(name), list) and raw[name] and all(value == raw[name][0] for value in raw[name])
        }
        fields = super().with_one_spelling(raw | same)
        if fields.get("moe_intermediate_size") == fields.get("intermediate_size"):
            fields.pop("moe_intermediate_size", None)
        return fields

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.num_experts_per_tok, normalise=True)


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    Config = HunYuanMoeConfig

    def make_experts(self, name: str) -> MixtureOfExperts:
        inner = self.config.intermediate_size
        shared = shared_mlp(self.config, f"{name}.shared_mlp", inner)
        return mixture(self.config, name, inner, "gate.wg", shared=shared)
