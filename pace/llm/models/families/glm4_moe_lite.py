"""GLM-4.7-Flash: DeepSeek-V3 with its own sizes, whose config lists the layers that have experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.deepseek_v3 import BiasedChoiceConfig, DeepseekV3ForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, declared, number, token_ids
from pace.ops.experts import MAX_EXPERTS


def read_mlp_layer_types(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(item in ("dense", "sparse") for item in value):
        raise ValueError("a list of dense and sparse, or null")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(BiasedChoiceConfig):
    vocab_size: int = count(154880)
    hidden_size: int = count(2048)
    intermediate_size: int = count(10240)
    moe_intermediate_size: int = count(1536)
    num_hidden_layers: int = count(47, MAX_LAYERS)
    num_attention_heads: int = count(20)
    num_key_value_heads: int | None = count(None, optional=True)
    num_experts: int = count(64, MAX_EXPERTS)
    num_experts_per_tok: int = count(4, MAX_EXPERTS)
    routed_scaling_factor: float = number(1.8, -1e6, 1e6)
    n_group: int = count(1, MAX_EXPERTS)
    topk_group: int = count(1, MAX_EXPERTS)
    q_lora_rank: int | None = count(768, optional=True)
    qk_nope_head_dim: int = count(192)
    v_head_dim: int = count(256)
    max_position_embeddings: int = count(202752, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)
    mlp_layer_types: tuple[str, ...] | None = declared(None, read_mlp_layer_types)

    aliases: ClassVar[dict[str, str]] = BiasedChoiceConfig.aliases | {"head_dim": "qk_rope_head_dim"}
    without_effect: ClassVar[dict[str, tuple]] = BiasedChoiceConfig.without_effect | {"first_k_dense_replace": (1,)}

    def check(self) -> None:
        super().check()
        if self.mlp_layer_types is not None and len(self.mlp_layer_types) < self.num_hidden_layers:
            raise ValueError(
                f"config.json: mlp_layer_types must name {self.num_hidden_layers} layers; got "
                f"{len(self.mlp_layer_types)}"
            )

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        kinds = self.mlp_layer_types or ("dense", *["sparse"] * (self.num_hidden_layers - 1))
        return super().derived(fields) | {"mlp_layer_types": kinds}

    def has_experts(self, layer: int) -> bool:
        return self.mlp_layer_types[layer] == "sparse"


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    Config = Glm4MoeLiteConfig
