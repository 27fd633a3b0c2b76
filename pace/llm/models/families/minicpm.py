"""MiniCPM 1 and 2: Llama with factors for embeddings, branches and the head's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import flag, number


@dataclass(frozen=True, kw_only=True)
class MiniCPMConfig(LlamaConfig):
    scale_emb: float = number(1.0, 1e-9, 1e9)
    scale_depth: float = number(1.0, 1e-9, 1e9)
    dim_model_base: float = number(1.0, 1e-9, 1e9)
    tie_word_embeddings: bool = flag(True)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,), "sparse_config": (None,)}

    @property
    def embedding_scale(self) -> float:
        return self.scale_emb

    @property
    def branch_scale(self) -> float:
        return self.scale_depth / self.num_hidden_layers**0.5

    @property
    def logits_scale(self) -> float:
        """Factor of the logits; the published code applies it to the head's input, which is equivalent because the head
        is linear."""
        return self.dim_model_base / self.hidden_size


class MiniCPMForCausalLM(LlamaForCausalLM):
    Config = MiniCPMConfig
