"""Hunyuan 3: normalised query and key heads, and experts chosen by biased sigmoids in all but the first layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, ListedMixturesConfig, biased_mixture
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class HYV3Config(ListedMixturesConfig, BiasedChoiceConfig, LlamaConfig):
    vocab_size: int = count(120832)
    intermediate_size: int = count(13312)
    num_hidden_layers: int = count(80, MAX_LAYERS)
    num_attention_heads: int = count(64)
    num_key_value_heads: int | None = count(8, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    num_experts: int = count(192, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(1536)
    routed_scaling_factor: float = number(2.826, -1e9, 1e9)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)
    num_dense: ClassVar[int] = 1

    aliases: ClassVar[dict[str, str]] = BiasedChoiceConfig.aliases | {"router_scaling_factor": "routed_scaling_factor"}
    only_here: ClassVar[dict[str, tuple]] = {
        "mlp_bias": (None, False),
        "n_group": (1,),
        "norm_topk_prob": (True,),
        "qk_norm": (None, True),
        "topk_group": (1,),
        "use_qk_norm": (None, True),
    }
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {
        "enable_moe_fp32_combine",
        "num_nextn_predict_layers",
    }
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 11158840.0}


class HYV3ForCausalLM(LlamaForCausalLM):
    Config = HYV3Config
    head_norm = True
    other_names: ClassVar[dict[str, str]] = {
        r"(.*\.mlp)\.router\.gate\.": r"\1.gate.",
        r"(.*\.mlp)\.(expert_bias|e_score_correction_bias)$": r"\1.gate.e_score_correction_bias",
        r"(.*\.mlp)\.shared_mlp\.": r"\1.shared_experts.",
        r"(.*layers\.\d+)\.final_layernorm\.": r"\1.shared_head.norm.",
    }
    num_further_layers = 1

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
