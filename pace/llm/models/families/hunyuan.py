"""Hunyuan without experts: Llama with query and key heads normalised after they are rotated, and a rotation base
stretched by a fixed factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers.rotary import FREQUENCIES
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import count, number, token_ids


@dataclass(frozen=True, kw_only=True)
class HunYuanConfig(LlamaConfig):
    vocab_size: int = count(290943)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    without_effect: ClassVar[dict[str, tuple]] = {"use_qk_norm": (None, True)}
    only_here: ClassVar[dict[str, tuple]] = {
        "mlp_bias": (False,),
        "use_cla": (None, False),
        "norm_type": ("rms", "hf_rms"),
        "num_experts": (None, 0, 1),
    }
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {
        "add_classification_head", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id",
        "im_start_id", "im_end_id", "im_newline_id", "mask_init_id", "org_vocab_size", "pad_id", "pool_type",
        "text_start_id", "text_end_id", "use_rotary_pos_emb",
    }  # fmt: skip
    rope_options: ClassVar[dict[str, Any]] = {"kinds": (*FREQUENCIES, "ntk_alpha")}


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    Config = HunYuanConfig
    head_norm = True
    head_norm_names = ("query_layernorm", "key_layernorm")
    norm_last = True
