"""OLMo 1 to 3. OLMo 1 is Llama with layer norms without weights, and may clip queries, keys and values. OLMo 2 and 3
have norms after each branch instead of before, one norm over all query heads together, and one over all key heads.
OLMo 3 has windows, and scales the rotation only on layers without."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import LayerNorm, RopeConfig, WholeNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.layer_types import FULL, SLIDING
from pace.llm.models.model_config import count, number, token_ids
from pace.llm.models.rope_config import fields_of_layers, read_rope

logger = logging.getLogger("pace")


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(LlamaConfig):
    vocab_size: int = count(50304)
    clip_qkv: float | None = number(None, 0.0, 1e30, optional=True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(50279)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    without_effect: ClassVar[dict[str, tuple]] = {"rms_norm_eps": (1e-6,)}

    @property
    def clip(self) -> float | None:
        return self.clip_qkv


class OlmoForCausalLM(LlamaForCausalLM):
    Config = OlmoConfig

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, eps=1e-5, affine=False)


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    vocab_size: int = count(50304)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(50279)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    without_effect: ClassVar[dict[str, tuple]] = {"clip_qkv": (None,)}


class Olmo2ForCausalLM(LlamaForCausalLM):
    Config = Olmo2Config
    norm_names = ()
    post_norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def make_head_norm(self, name: str, num_heads: int) -> WholeNorm:
        return WholeNorm(name, num_heads * self.config.head_dim, self.config.rms_norm_eps)


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, WindowedConfig):
    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields)
        local = fields_of_layers(fields, SLIDING, scaled=False) | {"rope_theta": None}
        rope = read_rope(local, values["head_dim"], self.max_position_embeddings, default_theta=5e5)
        if (theta := fields.get("rope_theta", rope.theta)) != rope.theta:
            logger.warning(
                "config.json: rope_theta = %s is ignored on layers with a window, as transformers does; theirs is %s",
                theta,
                rope.theta,
            )
        return values | {"local_rope": rope}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return read_rope(fields_of_layers(fields, FULL), head_dim, self.max_position_embeddings, default_theta=5e5)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    Config = Olmo3Config
