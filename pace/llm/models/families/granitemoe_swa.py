"""Granite with experts, and with the windows, sinks and rotations of `granite_swa`."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.models.families.granite_swa import GraniteSwaConfig, GraniteSWAForCausalLM
from pace.llm.models.families.granitemoe import GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSwaConfig(GraniteMoeSharedConfig, GraniteSwaConfig):
    vocab_size: int = count(32000)
    hidden_size: int = count(4096)
    intermediate_size: int = count(11008)
    num_hidden_layers: int = count(32, MAX_LAYERS)
    num_attention_heads: int = count(32)
    num_key_value_heads: int | None = count(None, optional=True)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    tie_word_embeddings: bool = flag(False)
    bos_token_id: int | tuple[int, ...] | None = token_ids(1)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)


class GraniteMoeSWAForCausalLM(GraniteMoeSharedForCausalLM, GraniteSWAForCausalLM):
    Config = GraniteMoeSwaConfig
