"""Bamba: Llama whose layers are mostly Mamba-2; those of attention rotate half of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Mixer
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mamba_config import MambaConfig, make_mamba
from pace.llm.models.families.mixture_config import layer_numbers
from pace.llm.models.model_config import MAX_POSITIONS, count, number, token_ids

ROTATED = 0.5
"""Part of a head that rotates, if `rope_parameters` has none."""


@dataclass(frozen=True, kw_only=True)
class BambaConfig(MambaConfig, LlamaConfig):
    vocab_size: int = count(128000)
    intermediate_size: int = count(14336)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(262144, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    attn_layer_indices: tuple[int, ...] = layer_numbers()
    """The layers of attention."""

    without_effect: ClassVar[dict[str, tuple]] = {"partial_rotary_factor": (ROTATED,), "attn_rotary_emb": (64,)}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {
        "mamba_chunk_size",
        "num_logits_to_keep",
        "z_loss_coefficient",
    }
    rope_options: ClassVar[dict[str, Any]] = {"partial": True, "default_partial": ROTATED}


class BambaForCausalLM(LlamaForCausalLM):
    Config = BambaConfig
    other_names: ClassVar[dict[str, str]] = {
        r"\.feed_forward\.": ".mlp.",
        r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
        r"^model\.final_layernorm\.": "model.norm.",
    }

    def make_mixer(self, name: str, index: int) -> Mixer:
        if index in self.config.attn_layer_indices:
            return super().make_mixer(name, index)
        return make_mamba(f"{name}.mamba", self.config.mamba)
