"""Kimi-Linear (48B-A3B): the delta rule with a decay for each channel in most layers, and latent attention without
positions in the others. Experts are as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import (
    Convolution,
    DeltaNet,
    FloatLinear,
    GatedNorm,
    Linear,
    Mixer,
    Rates,
    TensorSource,
    Vectors,
)
from pace.llm.models.families.deepseek_v3 import DeepseekV3ForCausalLM, LatentBiasedConfig
from pace.llm.models.families.mixtral import MixtralForCausalLM
from pace.llm.models.families.mixture_config import BiasedChoiceConfig, ListedMixturesConfig
from pace.llm.models.layer_types import FULL, LINEAR, check_layer_types, layer_types
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_KERNEL,
    MAX_LAYERS,
    MAX_POSITIONS,
    count,
    number,
    token_ids,
)
from pace.naming import shown
from pace.ops.experts import MAX_EXPERTS

PUBLISHED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Fields of `linear_attn_config`, and their names outside of it."""
LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}
"""Its lists of layers, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig(ListedMixturesConfig, LatentBiasedConfig):
    """Kimi delta attention in most layers, latent attention in the others, and mixtures in all but the first ones."""

    first_k_dense_replace: int = count(1, MAX_LAYERS, minimum=0)
    """Number of first layers without experts, if `mlp_layer_types` is not given."""
    q_lora_rank: int | None = count(None, optional=True)
    layer_types: tuple[str, ...] | None = layer_types((FULL, LINEAR))
    linear_head_dim: int = count(128, MAX_HEAD_DIM)
    linear_num_heads: int = count(32)
    linear_conv_kernel_dim: int = count(4, MAX_KERNEL)

    aliases: ClassVar[dict[str, str]] = BiasedChoiceConfig.aliases | {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
    }
    only_here: ClassVar[dict[str, tuple]] = {"hidden_act": ("silu", "swish")}
    low_rank: ClassVar[bool]
    """True if gates and steps are the product of two matrices, whose rank is the width of a head."""
    lower_bound: ClassVar[float] = 0.0
    """See `RecurrenceOptions`."""

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        layers = range(self.num_hidden_layers)
        usual = tuple(FULL if self.attends(layer) else LINEAR for layer in layers)
        return super().derived(fields) | {"layer_types": self.layer_types or usual}

    def attends(self, layer: int) -> bool:
        """True for latent attention, if `layer_types` is not given."""
        raise NotImplementedError

    @property
    def num_dense(self) -> int:
        return self.first_k_dense_replace


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(KimiDeltaConfig):
    vocab_size: int = count(163840)
    hidden_size: int = count(2304)
    intermediate_size: int = count(9216)
    moe_intermediate_size: int = count(1024)
    num_hidden_layers: int = count(27, MAX_LAYERS)
    num_attention_heads: int = count(32)
    num_key_value_heads: int | None = count(32, optional=True)
    num_experts: int = count(256, MAX_EXPERTS)
    routed_scaling_factor: float = number(2.446, -1e9, 1e9)
    max_position_embeddings: int = count(1048576, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(163584)
    eos_token_id: int | tuple[int, ...] | None = token_ids(163586)
    pad_token_id: int | tuple[int, ...] | None = token_ids(163839)

    only_here: ClassVar[dict[str, tuple]] = {
        "mla_use_nope": (None, True),
        "moe_router_activation_func": (None, "sigmoid"),
        "use_grouped_topk": (None, True),
    }
    low_rank: ClassVar[bool] = True

    @classmethod
    def with_one_spelling(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Moves the fields of `linear_attn_config` to the top."""
        fields = super().with_one_spelling(raw)
        inner = fields.pop("linear_attn_config", None) or {}
        if not isinstance(inner, dict):
            raise ValueError(f"config.json: linear_attn_config must be an object or null; got {shown(inner)}")
        fields |= {name: inner[published] for published, name in PUBLISHED.items() if published in inner}
        if fields.get("layer_types") is None and inner.keys() >= LISTS.keys():
            fields["layer_types"] = kinds_of(inner, fields.get("num_hidden_layers", 27))
        return fields

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> None:
        """No layer rotates."""

    def attends(self, layer: int) -> bool:
        return layer > 0 and layer % 4 == 0

    @property
    def attention_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


def kinds_of(inner: dict[str, Any], num_layers: Any) -> list[str]:
    """Returns the kinds of layers that the lists of `linear_attn_config` name. Raises ValueError unless they name each
    layer once."""
    found = {}
    for name, kind in LISTS.items():
        layers = inner[name]
        if not isinstance(layers, list) or not all(type(layer) is int and 0 < layer <= MAX_LAYERS for layer in layers):
            raise ValueError(
                f"config.json: linear_attn_config.{name} must be a list of numbers of layers, counted from 1; got "
                f"{shown(layers)}"
            )
        found |= dict.fromkeys(layers, kind)
    if not found or sorted(found) != list(range(1, len(found) + 1)) or len(found) != num_layers:
        raise ValueError(
            f"config.json: {' and '.join(LISTS)} of linear_attn_config must name each of {shown(num_layers)} layers; "
            f"got {len(found)}"
        )
    return [found[layer] for layer in sorted(found)]


class KimiDeltaForCausalLM(DeepseekV3ForCausalLM):
    Config: ClassVar[type[KimiDeltaConfig]]

    def make_mixer(self, name: str, index: int) -> Mixer:
        if self.config.layer_types[index] == FULL:
            return super().make_mixer(name, index)
        return self.make_delta_net(f"{name}.self_attn")

    def make_delta_net(self, name: str) -> DeltaNet:
        config = self.config
        hidden, heads, dim = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        width, low_rank = heads * dim, config.low_rank
        gates, steps = ({f"{name}.{x}_a_proj": dim} if low_rank else {f"{name}.{x}_proj": width} for x in "gf")
        return DeltaNet(
            Linear({f"{name}.{part}_proj": width for part in "qkv"} | gates, hidden),
            FloatLinear({f"{name}.b_proj": heads} | steps, hidden),
            Convolution(
                {f"{name}.{part}_conv1d": width for part in "qkv"}, config.linear_conv_kernel_dim, activation="silu"
            ),
            self.make_rates(f"{name}.A_log"),
            Vectors({f"{name}.dt_bias": width}),
            GatedNorm(f"{name}.o_norm", dim, config.rms_norm_eps, heads, "sigmoid"),
            Linear({f"{name}.o_proj": hidden}, width),
            heads,
            dim,
            heads,
            dim,
            decay_dim=dim,
            lower_bound=config.lower_bound,
            gates_up=Linear({f"{name}.g_b_proj": width}, dim) if low_rank else None,
            steps_up=FloatLinear({f"{name}.f_b_proj": width}, dim) if low_rank else None,
        )

    def make_rates(self, name: str) -> Rates:
        return Rates({name: self.config.linear_num_heads})


class KimiLinearForCausalLM(KimiDeltaForCausalLM):
    Config = KimiLinearConfig
    other_names: ClassVar[dict[str, str]] = MixtralForCausalLM.other_names

    def make_rates(self, name: str) -> Rates:
        heads = self.config.linear_num_heads
        return Rates({name: heads}, {name: TensorSource((1, 1, heads, 1))})
