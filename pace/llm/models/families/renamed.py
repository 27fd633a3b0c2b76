"""Families that `transformers` runs as Llama, with other names and defaults: EXAONE 3, InternLM 3, IQuest-Coder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, number, token_ids


class RenamedForCausalLM(LlamaForCausalLM):
    saved_as = "LlamaForCausalLM"


@dataclass(frozen=True, kw_only=True)
class ExaoneConfig(LlamaConfig):
    vocab_size: int = count(102400)
    intermediate_size: int = count(14336)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(361)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    aliases: ClassVar[dict[str, str]] = {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
    }
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 5e5}


class ExaoneForCausalLM(RenamedForCausalLM):
    Config = ExaoneConfig
    other_names: ClassVar[dict[str, str]] = {
        r"^transformer\.wte\.": "model.embed_tokens.",
        r"^transformer\.ln_f\.": "model.norm.",
        r"^transformer\.h\.": "model.layers.",
        r"\.attn\.attention\.out_proj\.": ".self_attn.o_proj.",
        r"\.attn\.attention\.": ".self_attn.",
        r"\.ln_1\.": ".input_layernorm.",
        r"\.ln_2\.": ".post_attention_layernorm.",
        r"\.mlp\.c_fc_0\.": ".mlp.gate_proj.",
        r"\.mlp\.c_fc_1\.": ".mlp.up_proj.",
        r"\.mlp\.c_proj\.": ".mlp.down_proj.",
    }


@dataclass(frozen=True, kw_only=True)
class InternLM3Config(LlamaConfig):
    vocab_size: int = count(128512)
    intermediate_size: int = count(10240)
    num_hidden_layers: int = count(48, MAX_LAYERS)
    num_key_value_heads: int | None = count(2, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(2)

    aliases: ClassVar[dict[str, str]] = {"bias": "mlp_bias", "qkv_bias": "attention_bias"}

    def check(self) -> None:
        super().check()
        if self.attention_bias != self.mlp_bias:
            raise NotImplementedError("config.json: qkv_bias other than bias is not implemented for InternLM3")


class InternLM3ForCausalLM(RenamedForCausalLM):
    Config = InternLM3Config


@dataclass(frozen=True, kw_only=True)
class IQuestCoderConfig(LlamaConfig):
    vocab_size: int = count(76800)
    hidden_size: int = count(5120)
    intermediate_size: int = count(27648)
    num_hidden_layers: int = count(80, MAX_LAYERS)
    num_attention_heads: int = count(40)
    num_key_value_heads: int | None = count(8, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)

    without_effect: ClassVar[dict[str, tuple]] = {"sliding_window": (None,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"max_window_layers"}


class IQuestCoderForCausalLM(RenamedForCausalLM):
    Config = IQuestCoderConfig
