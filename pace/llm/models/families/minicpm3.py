"""MiniCPM3: latent attention in a dense model, with scales of embeddings, branches and logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.models.families.latent import LatentConfig, LatentForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, check_divides, count, flag, number


@dataclass(frozen=True, kw_only=True)
class MiniCPM3Config(LatentConfig):
    vocab_size: int = count(73448)
    hidden_size: int = count(2560)
    intermediate_size: int = count(6400)
    num_hidden_layers: int = count(62, MAX_LAYERS)
    num_attention_heads: int = count(40)
    num_key_value_heads: int | None = count(None, optional=True)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    tie_word_embeddings: bool = flag(True)
    kv_lora_rank: int = count(256, MAX_HEAD_DIM)
    q_lora_rank: int | None = count(768, optional=True)
    qk_nope_head_dim: int = count(64)
    qk_rope_head_dim: int = count(32, MAX_HEAD_DIM, minimum=2)
    v_head_dim: int | None = count(None, optional=True)
    scale_emb: float = number(12.0, -1e6, 1e6)
    scale_depth: float | None = number(1.4, -1e6, 1e6, optional=True)
    dim_model_base: int | None = count(256, optional=True)

    without_effect: ClassVar[dict[str, tuple]] = {"rope_interleave": (False,)}
    also_read: ClassVar[frozenset[str]] = LatentConfig.also_read | {"qk_head_dim"}

    def check(self) -> None:
        super().check()
        if self.v_head_dim is None:
            check_divides(self, "num_attention_heads", "hidden_size")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        v_head_dim = self.v_head_dim or self.hidden_size // self.num_attention_heads
        return super().derived(fields) | {"v_head_dim": v_head_dim}

    @property
    def rotates_neighbours(self) -> bool:
        return False

    @property
    def embedding_scale(self) -> float:
        return self.scale_emb

    @property
    def branch_scale(self) -> float:
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logits_scale(self) -> float:
        return 1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size


class MiniCPM3ForCausalLM(LatentForCausalLM):
    Config = MiniCPM3Config

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings, rounded to the weights' dtype, like `transformers`."""
        return torch.tensor(self.config.embedding_scale).to(self.dtype).item()
