"""Qwen3: Qwen2 with normalised query and key heads, and no biases unless the config asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.qwen2 import Qwen2Config, Qwen2ForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, count, flag


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    head_dim: int = count(128, MAX_HEAD_DIM)
    attention_bias: bool = flag(False)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.attention_bias


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    Config = Qwen3Config
    head_norm = True
