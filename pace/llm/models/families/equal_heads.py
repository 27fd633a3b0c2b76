"""Config of families whose heads together are as wide as the hidden state."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.models.model_config import ModelConfig, check_divides, checked_head_dim


@dataclass(frozen=True, kw_only=True)
class EqualHeadsConfig(ModelConfig):
    """A subclass declares `hidden_size` and `num_attention_heads`. Each query head has its own key and value."""

    def check(self) -> None:
        check_divides(self, "num_attention_heads", "hidden_size")
        checked_head_dim(self.head_dim)

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads
