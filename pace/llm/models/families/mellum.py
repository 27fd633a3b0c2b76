"""Mellum 2 (12B-A2.5B): Qwen3-MoE with windows on some layers, which rotate differently from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import ListedMixturesConfig, MixtureConfig
from pace.llm.models.families.qwen3_moe import Qwen3MoeForCausalLM
from pace.llm.models.families.windowed import TwoRotationsConfig
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class MellumConfig(ListedMixturesConfig, MixtureConfig, TwoRotationsConfig):
    vocab_size: int = count(98304)
    hidden_size: int = count(2304)
    intermediate_size: int = count(7168)
    num_hidden_layers: int = count(28, MAX_LAYERS)
    num_key_value_heads: int = count(4)
    head_dim: int = count(128, MAX_HEAD_DIM)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    sliding_window: int | None = count(1024, MAX_POSITIONS, optional=True)
    num_experts: int = count(64, MAX_EXPERTS)
    num_experts_per_tok: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(896)
    norm_topk_prob: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {
        "decoder_sparse_step": (None, 1),
        "mlp_bias": (None, False),
        "mlp_only_layers": (None, []),
        "use_qk_norm": (None, True),
    }
    without_effect: ClassVar[dict[str, tuple]] = {"use_sliding_window": (None, True)}
    also_read: ClassVar[frozenset[str]] = TwoRotationsConfig.also_read | {
        "max_window_layers",
        "mtp_layer_types",
        "mtp_mlp_layer_types",
        "num_mtp_layers",
        "num_nextn_predict_layers",
    }


class MellumForCausalLM(Qwen3MoeForCausalLM):
    Config = MellumConfig
    ignored_tensors = (*LlamaForCausalLM.ignored_tensors, r"(model\.)?mtp\..*")
