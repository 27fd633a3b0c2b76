"""EXAONE-MoE (K-EXAONE 236B-A23B): experts chosen by biased sigmoids, normalised heads, and windows on most layers. The
others do not rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.exaone4 import PatternConfig
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, ListedMixturesConfig, biased_mixture
from pace.llm.models.model_config import MAX_LAYERS, count, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class ExaoneMoeConfig(ListedMixturesConfig, BiasedChoiceConfig, PatternConfig):
    vocab_size: int = count(102400)
    intermediate_size: int = count(16384)
    num_key_value_heads: int | None = count(32, optional=True)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    num_experts: int = count(64, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(1024)
    routed_scaling_factor: float = number(2.5, -1e9, 1e9)
    first_k_dense_replace: int = count(1, MAX_LAYERS, minimum=0)
    """Number of first layers without experts, if `mlp_layer_types` is not given."""
    eos_token_id: int | tuple[int, ...] | None = token_ids(53)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    aliases: ClassVar[dict[str, str]] = BiasedChoiceConfig.aliases | {
        "first_last_k_dense_replace": "first_k_dense_replace"
    }
    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (None, False), "mlp_bias": (None, False)}
    also_read: ClassVar[frozenset[str]] = PatternConfig.also_read | {"is_moe_layer", "num_nextn_predict_layers"}

    @property
    def num_dense(self) -> int:
        return self.first_k_dense_replace


class ExaoneMoeForCausalLM(LlamaForCausalLM):
    Config = ExaoneMoeConfig
    head_norm = True
    other_names: ClassVar[dict[str, str]] = {
        r"(.*\.mlp)\.e_score_correction_bias": r"\1.gate.e_score_correction_bias",
    }
    ignored_tensors = (*LlamaForCausalLM.ignored_tensors, r"(model\.)?mtp.*")

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
