"""SmolLM3: Llama without rotation on every fourth layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.unrotated import UnrotatedConfig
from pace.llm.models.families.windowed import SwitchedWindowConfig
from pace.llm.models.layer_types import SLIDING
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(SwitchedWindowConfig, UnrotatedConfig):
    vocab_size: int = count(128256)
    hidden_size: int = count(2048)
    num_hidden_layers: int = count(36, MAX_LAYERS)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(4, optional=True)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(128000)
    eos_token_id: int | tuple[int, ...] | None = token_ids(128001)
    pad_token_id: int | tuple[int, ...] | None = token_ids(128004)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)

    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"max_window_layers"}
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 2e6}

    def window(self, layer: int) -> int | None:
        slides = self.layer_types[layer] == SLIDING if self.layer_types else not self.no_rope_layers[layer]
        return self.effective_window if slides else None


class SmolLM3ForCausalLM(LlamaForCausalLM):
    Config = SmolLM3Config
