"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and a sliding window on the upper layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.layer_types import SLIDING, check_layer_types, layer_types
from pace.llm.models.model_config import MAX_POSITIONS, count, flag, token_ids


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    vocab_size: int = count(151936)
    intermediate_size: int = count(22016)
    num_key_value_heads: int | None = count(32, optional=True)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    use_sliding_window: bool = flag(False)
    sliding_window: int | None = count(4096, MAX_POSITIONS, optional=True)
    max_window_layers: int = count(28, MAX_POSITIONS, minimum=0)
    layer_types: tuple[str, ...] | None = layer_types()
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (True,), "mlp_bias": (False,)}
    qkv_bias: ClassVar[bool] = True
    output_bias: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)
        if SLIDING in (self.layer_types or ()) and self.effective_window is None:
            raise ValueError(
                "config.json: layer_types asks for sliding_attention, but use_sliding_window is false or "
                "sliding_window is null"
            )

    @property
    def effective_window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def window(self, layer: int) -> int | None:
        if self.layer_types is not None:
            return self.effective_window if self.layer_types[layer] == SLIDING else None
        return self.effective_window if layer >= self.max_window_layers else None


class Qwen2ForCausalLM(LlamaForCausalLM):
    Config = Qwen2Config
