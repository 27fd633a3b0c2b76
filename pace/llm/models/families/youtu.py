"""Youtu-LLM: the latent attention of DeepSeek-V3 in a dense model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.latent import LatentConfig, LatentForCausalLM
from pace.llm.models.model_config import MAX_POSITIONS, count, flag, token_ids


@dataclass(frozen=True, kw_only=True)
class YoutuConfig(LatentConfig):
    vocab_size: int = count(128256)
    hidden_size: int = count(2048)
    intermediate_size: int = count(6144)
    num_attention_heads: int = count(16)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    rope_interleave: bool = flag(True)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(128000)
    eos_token_id: int | tuple[int, ...] | None = token_ids(128001)

    without_effect: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    also_read: ClassVar[frozenset[str]] = LatentConfig.also_read | {"embedding_initializer_range", "qk_head_dim"}

    @property
    def rotates_neighbours(self) -> bool:
        return self.rope_interleave


class YoutuForCausalLM(LatentForCausalLM):
    Config = YoutuConfig
