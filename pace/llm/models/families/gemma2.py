"""Gemma 2: Gemma with four norms per layer, capped scores and logits, and windows on every other layer. VaultGemma has
only the two norms of inputs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.gemma import GemmaForCausalLM
from pace.llm.models.families.llama import LlamaConfig
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    count,
    flag,
    number,
    token_ids,
)

logger = logging.getLogger("pace")


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(WindowedConfig):
    vocab_size: int = count(256000)
    hidden_size: int = count(2304)
    intermediate_size: int = count(9216)
    num_hidden_layers: int = count(26, MAX_LAYERS)
    num_attention_heads: int = count(8)
    num_key_value_heads: int | None = count(4)
    head_dim: int | None = count(256, MAX_HEAD_DIM)
    hidden_activation: str = activation("gelu_tanh")
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    query_pre_attn_scalar: float = number(256.0, 1e-6, 1e9)
    attn_logit_softcapping: float | None = number(50.0, 1e-6, 1e9, optional=True)
    final_logit_softcapping: float | None = number(30.0, 1e-6, 1e9, optional=True)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(2)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    aliases: ClassVar[dict[str, str]] = {"sliding_window_size": "sliding_window"}
    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"cache_implementation"}

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        if "hidden_act" in fields and self.hidden_act != self.hidden_activation:
            logger.warning(
                "config.json: hidden_act (%s) is ignored, as transformers does; hidden_activation is %s",
                self.hidden_act,
                self.hidden_activation,
            )
        return super().derived(fields) | {"hidden_act": self.hidden_activation}

    @property
    def attention_scale(self) -> float | None:
        return self.query_pre_attn_scalar**-0.5

    @property
    def attention_softcap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def logits_softcap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def full_every(self) -> int:
        return 2


class Gemma2ForCausalLM(GemmaForCausalLM):
    Config = Gemma2Config
    norm_names = ("input_layernorm", "pre_feedforward_layernorm")
    post_norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    post_norm_names = ()
