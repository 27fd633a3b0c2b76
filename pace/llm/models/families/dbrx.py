"""DBRX 132B-A36B: a Llama with LayerNorms without biases, clipped queries, keys and values, and a mixture of experts in
every layer. Each matrix of all experts is one tensor, and that of down is transposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import ExpertLinear, FeedForward, LayerNorm, MixtureOfExperts, RouterLinear, RowRange, TensorSource
from pace.llm.layers.experts import Form, one_by_one, stacked
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig
from pace.llm.models.model_config import HARMLESS, MAX_LAYERS, count, declared, number, token_ids
from pace.naming import shown
from pace.ops.experts import MAX_EXPERTS, Router

NESTED = ("attn_config", "ffn_config")
"""Objects with fields that are read as if they were at the top."""


def read_power(value: Any) -> float | None:
    if value is None or value == 1 and not isinstance(value, bool):
        return value
    raise NotImplementedError(f"{shown(value)} is not implemented; implemented: 1, null")


@dataclass(frozen=True, kw_only=True)
class DbrxConfig(MixtureConfig, LlamaConfig):
    hidden_size: int = count(2048)
    intermediate_size: int = count(3584)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(1, optional=True)
    num_experts: int = count(4, MAX_EXPERTS)
    num_experts_per_tok: int = count(1, MAX_EXPERTS)
    clip_qkv: float | None = number(None, 0.0, 1e30, optional=True)
    moe_normalize_expert_weights: float | None = declared(1.0, read_power)
    """Power of the norm that divides the weights of the chosen experts; null for no division."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    aliases: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "kv_n_heads": "num_key_value_heads",
        "max_seq_len": "max_position_embeddings",
        "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    }
    only_here: ClassVar[dict[str, tuple]] = {
        "attention_bias": (False,),
        "layer_norm_eps": (1e-5,),
        "mlp_bias": (False,),
    }
    without_effect: ClassVar[dict[str, tuple]] = {"rms_norm_eps": (1e-6,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"moe_jitter_eps", "moe_loss_weight"}

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for section in NESTED:
            values = raw.get(section) or {}
            if not isinstance(values, dict):
                raise ValueError(f"config.json: {section} must be an object or null; got {shown(values)}")
            # The hidden_size of ffn_config has no effect.
            found |= {
                name: value for name, value in values.items() if name != "hidden_size" and not HARMLESS.fullmatch(name)
            }
        found |= {name: value for name, value in raw.items() if name not in NESTED}
        if isinstance(activation := found.pop("ffn_act_fn", None), dict):
            if others := sorted(activation.keys() - {"name"}):
                raise NotImplementedError(f"config.json: ffn_act_fn with {', '.join(others)} is not implemented")
            found["hidden_act"] = activation.get("name", "silu")
        return found

    @property
    def clip(self) -> float | None:
        return self.clip_qkv

    @property
    def router(self) -> Router:
        normalise = self.moe_normalize_expert_weights is not None
        return Router(self.num_experts, self.num_experts_per_tok, normalise=normalise)


class DbrxForCausalLM(LlamaForCausalLM):
    Config = DbrxConfig
    qkv_names = ("qkv_proj",)
    other_names: ClassVar[dict[str, str]] = {
        r"^transformer\.wte\.": "model.embed_tokens.",
        r"^transformer\.norm_f\.": "model.norm.",
        r"^transformer\.blocks\.": "model.layers.",
        r"\.norm_attn_norm\.norm_1\.": ".input_layernorm.",
        r"\.norm_attn_norm\.norm_2\.": ".post_attention_layernorm.",
        r"\.norm_attn_norm\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.norm_attn_norm\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.ffn\.router\.layer\.": ".mlp.gate.",
        r"\.ffn\.experts\.mlp\.(w1|v1|w2)(\.weight)?$": r".mlp.experts.\1",
    }

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, eps=1e-5, bias=False)

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config, experts = self.config, f"{name}.mlp.experts"
        count, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        gate_up, down = ("gate_proj", "up_proj"), ("down_proj",)
        return MixtureOfExperts(
            RouterLinear({f"{name}.mlp.gate": count}, hidden),
            config.router,
            ExpertLinear(
                count,
                hidden,
                one_by_one(experts, gate_up, inner),
                rows_of_all(experts, {"gate_proj": "w1", "up_proj": "v1"}, inner, count, hidden),
                stacked(experts, gate_up, inner, count, hidden),
                glu=True,
            ),
            ExpertLinear(
                count,
                inner,
                one_by_one(experts, down, hidden),
                columns_of_all(experts, "down_proj", "w2", hidden, count, inner),
                stacked(experts, down, hidden, count, inner),
            ),
            config.hidden_act,
        )


def rows_of_all(name: str, tensors: dict[str, str], rows: int, count: int, k: int) -> Form:
    """A tensor `[count * rows, k]` for each part of all experts."""
    return lambda expert: {
        f"{name}.{expert}.{part}": TensorSource((count * rows, k), (RowRange(expert * rows, rows),), f"{name}.{tensor}")
        for part, tensor in tensors.items()
    }


def columns_of_all(name: str, part: str, tensor: str, rows: int, count: int, k: int) -> Form:
    """A tensor `[count * k, rows]` for a part of all experts."""
    return lambda expert: {
        f"{name}.{expert}.{part}": TensorSource(
            (count, k, rows), (RowRange(expert * rows, rows),), f"{name}.{tensor}", transposed=True, is_flat=True
        )
    }
