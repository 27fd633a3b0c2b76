"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: Llama with fused QKV and gate/up tensors, longrope and partial
rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_POSITIONS, count, number, token_ids
from pace.llm.models.rope_config import first_long


@dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    vocab_size: int = count(32064)
    hidden_size: int = count(3072)
    intermediate_size: int = count(8192)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    sliding_window: int | None = count(None, MAX_POSITIONS, optional=True)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(32000)
    pad_token_id: int | tuple[int, ...] | None = token_ids(32000)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (False,), "mlp_bias": (False,)}
    rope_options: ClassVar[dict[str, Any]] = {
        "kinds": ("default", "longrope"),
        "kind_names": {"su": "longrope", "yarn": "longrope"},
        "original_max_positions": 4096,
        "partial": True,
    }

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Phi3ForCausalLM(LlamaForCausalLM):
    Config = Phi3Config
    qkv_names = ("qkv_proj",)
    gate_up_names = ("gate_up_proj",)

    @property
    def recompute_length(self) -> int | None:
        """Length from which the long factors are used. There, `transformers` recomputes the whole sequence with them;
        for other models it does not."""
        return first_long(self.config.rope)
