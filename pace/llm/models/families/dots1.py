"""dots.llm1 (142B-A14B): the attention of Qwen3, and experts chosen by biased sigmoids in all but the first layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import MixtureOfExperts
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, biased_mixture
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.layer_types import FULL, SLIDING
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids
from pace.ops.experts import MAX_EXPERTS

NEEDED = ("num_experts", "num_experts_per_tok", "n_shared_experts")
"""Fields without a default."""


@dataclass(frozen=True, kw_only=True)
class Dots1Config(BiasedChoiceConfig, WindowedConfig):
    vocab_size: int = count(152064)
    hidden_size: int = count(4608)
    intermediate_size: int = count(10944)
    num_hidden_layers: int = count(62, MAX_LAYERS)
    num_attention_heads: int = count(32)
    num_key_value_heads: int | None = count(32, optional=True)
    max_window_layers: int = count(62, MAX_POSITIONS, minimum=0)
    """Number of first layers without a window, if `layer_types` is not given."""
    num_experts: int | None = count(None, MAX_EXPERTS, optional=True)
    num_experts_per_tok: int | None = count(None, MAX_EXPERTS, optional=True)
    n_shared_experts: int | None = count(None, optional=True)
    first_k_dense_replace: int = count(0, MAX_LAYERS, minimum=0)
    norm_topk_prob: bool = flag(False)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {
        "mlp_bias": (None, False),
        "moe_layer_freq": (None, 1),
        "scoring_func": (None, "sigmoid", "noaux_tc"),
    }

    def check(self) -> None:
        if missing := [name for name in NEEDED if getattr(self, name) is None]:
            raise ValueError(f"config.json: {missing[0]} is missing or null")
        super().check()

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
        return self.layer_types or tuple(FULL if i < first else SLIDING for i in range(self.num_hidden_layers))

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


class Dots1ForCausalLM(LlamaForCausalLM):
    Config = Dots1Config
    head_norm = True

    def make_experts(self, name: str) -> MixtureOfExperts:
        return biased_mixture(self.config, name)
