"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with matrices as they are. Usually all query heads share one key and one
value head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.layers import Linear
from pace.llm.models.families.gpt2 import GPT2Config, GPT2LMHeadModel
from pace.llm.models.families.gpt_neox import qkv_by_group
from pace.llm.models.model_config import activation, flag


@dataclass(frozen=True, kw_only=True)
class GPTBigCodeConfig(GPT2Config):
    activation_function: str = activation("gelu_tanh")
    multi_query: bool = flag(True)
    """False if each query head has its own key and value; rows are then stored head by head."""
    matrices_transposed: bool = flag(False)

    only_here: ClassVar[dict[str, tuple]] = {"scale_attn_by_inverse_layer_idx": (False,)}
    without_effect: ClassVar[dict[str, tuple]] = {"num_key_value_heads": (1,)}
    also_read: ClassVar[frozenset[str]] = GPT2Config.also_read | {
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        *("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "pad_key_length"),
        *("max_batch_size", "max_sequence_length"),
    }

    @property
    def num_key_value_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    Config = GPTBigCodeConfig

    def make_qkv(self, name: str) -> Linear:
        config = self.config
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        rows = hidden + 2 * dim if config.multi_query else qkv_by_group(hidden, heads, heads, dim)
        return Linear({name: rows}, hidden, bias=True)
