"""AFMoE (Trinity Nano, Mini, Large): experts chosen by biased sigmoids, and gated attention. There are norms before and
after each branch. Only layers with a window rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import Attention, MixtureOfExperts
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, biased_mixture
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class AfmoeConfig(BiasedChoiceConfig, WindowedConfig):
    vocab_size: int = count(200192)
    hidden_size: int = count(2048)
    intermediate_size: int = count(6144)
    num_hidden_layers: int = count(32, MAX_LAYERS)
    num_dense_layers: int = count(1, MAX_LAYERS, minimum=0)
    num_attention_heads: int = count(16)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(16384, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    num_experts: int = count(64, MAX_EXPERTS)
    num_experts_per_tok: int = count(6, MAX_EXPERTS)
    n_shared_experts: int = count(2, minimum=0)
    global_attn_every_n_layers: int = count(4, MAX_LAYERS)
    sliding_window: int | None = count(1024, MAX_POSITIONS, optional=True)
    mup_enabled: bool = flag(False)
    """True if embeddings are multiplied by the root of `hidden_size`."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    aliases: ClassVar[dict[str, str]] = BiasedChoiceConfig.aliases | {"route_scale": "routed_scaling_factor"}
    only_here: ClassVar[dict[str, tuple]] = {
        "mlp_bias": (None, False),
        "n_group": (1,),
        "num_expert_groups": (None, 1),
        "num_limited_groups": (None, 1),
        "route_norm": (None, True),
        "score_func": (None, "sigmoid"),
        "topk_group": (1,),
    }
    also_read: ClassVar[frozenset[str]] = WindowedConfig.also_read | {"load_balance_coeff", "use_grouped_mm"}
    only_windows_rotate: ClassVar[bool] = True

    @property
    def full_every(self) -> int:
        return self.global_attn_every_n_layers

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5 if self.mup_enabled else 1.0

    def has_experts(self, layer: int) -> bool:
        return layer >= self.num_dense_layers


class AfmoeForCausalLM(LlamaForCausalLM):
    Config = AfmoeConfig
    norm_names = ("input_layernorm", "pre_mlp_layernorm")
    post_norm_names = ("post_attention_layernorm", "post_mlp_layernorm")
    head_norm = True
    other_names: ClassVar[dict[str, str]] = {
        r"(.*\.mlp)\.router\.gate\.": r"\1.gate.",
        r"(.*\.mlp)\.expert_bias": r"\1.gate.e_score_correction_bias",
    }

    def make_attention(self, name: str, index: int) -> Attention:
        config, attention = self.config, super().make_attention(name, index)
        attention.add_gate(f"{name}.gate_proj", config.num_attention_heads * config.head_dim, "sigmoid")
        return attention

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
