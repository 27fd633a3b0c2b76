"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and a sliding window on the upper layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.windowed import SwitchedWindowConfig
from pace.llm.models.layer_types import SLIDING
from pace.llm.models.model_config import MAX_POSITIONS, count, token_ids


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(SwitchedWindowConfig):
    vocab_size: int = count(151936)
    intermediate_size: int = count(22016)
    num_key_value_heads: int | None = count(32, optional=True)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    max_window_layers: int = count(28, MAX_POSITIONS, minimum=0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (True,), "mlp_bias": (False,)}
    qkv_bias: ClassVar[bool] = True
    output_bias: ClassVar[bool] = False

    def window(self, layer: int) -> int | None:
        if self.layer_types is not None:
            return self.effective_window if self.layer_types[layer] == SLIDING else None
        return self.effective_window if layer >= self.max_window_layers else None


class Qwen2ForCausalLM(LlamaForCausalLM):
    Config = Qwen2Config
