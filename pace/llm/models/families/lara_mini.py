"""Lara 4 Mini: the gated delta rule, windows, and attention without positions in turn, with experts next to an MLP for
all tokens. The inputs of a delta rule are one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import DeltaNet, FloatLinear, Linear, Mixer, MixtureOfExperts, RowRange, TensorSource
from pace.llm.models.families.delta_rule import DeltaRuleConfig, GatedDeltaForCausalLM
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, mixture, shared_mlp
from pace.llm.models.layer_types import FULL, LINEAR, SLIDING, layer_types
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids
from pace.ops.experts import MAX_EXPERTS

PERIOD = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
"""Kinds of layers, if `layer_types` is not given."""


@dataclass(frozen=True, kw_only=True)
class LaraMiniConfig(MixtureConfig, DeltaRuleConfig):
    vocab_size: int = count(151936)
    hidden_size: int = count(1024)
    num_hidden_layers: int = count(34, MAX_LAYERS)
    num_attention_heads: int = count(16)
    num_key_value_heads: int | None = count(4, optional=True)
    head_dim: int = count(128, MAX_HEAD_DIM)
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    sliding_window: int = count(512, MAX_POSITIONS)
    layer_types: tuple[str, ...] | None = layer_types((FULL, SLIDING, LINEAR))
    linear_num_key_heads: int = count(8)
    linear_num_value_heads: int = count(16)
    num_experts: int = count(128, MAX_EXPERTS)
    num_experts_per_tok: int = count(4, MAX_EXPERTS)
    moe_intermediate_size: int = count(512)
    shared_expert_intermediate_size: int = count(512)
    norm_topk_prob: bool = flag(True)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(151643)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        types = self.layer_types or tuple(PERIOD[layer % len(PERIOD)] for layer in range(self.num_hidden_layers))
        return super().derived(fields) | {"layer_types": types}

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def rotation(self, layer: int) -> int | None:
        return 0 if self.layer_types[layer] == SLIDING else None


class LaraMiniForCausalLM(LlamaForCausalLM):
    Config = LaraMiniConfig
    head_norm = True
    other_names: ClassVar[dict[str, str]] = {r"\.linear_attn\.out_norm\.": ".linear_attn.norm."}

    def make_mixer(self, name: str, index: int) -> Mixer:
        if self.config.layer_types[index] == LINEAR:
            return self.make_delta_net(f"{name}.linear_attn")
        return super().make_mixer(name, index)

    def make_delta_net(self, name: str) -> DeltaNet:
        return GatedDeltaForCausalLM.make_delta_net(self, name)

    def make_inputs(self, name: str) -> Linear:
        """Makes the product whose columns are q, k, v and z of a delta rule."""
        config = self.config
        return Linear({f"{name}.qkvz": self.of_inputs(name, 0, config.inputs_width)}, config.hidden_size)

    def make_steps(self, name: str) -> FloatLinear:
        """Makes the product whose columns are beta and the steps of a delta rule."""
        config = self.config
        rows = self.of_inputs(name, config.inputs_width, 2 * config.linear_num_value_heads)
        return FloatLinear({f"{name}.ba": rows}, config.hidden_size)

    def of_inputs(self, name: str, first: int, count: int) -> TensorSource:
        """Locates rows of the tensor with all inputs."""
        config = self.config
        shape = config.inputs_width + 2 * config.linear_num_value_heads, config.hidden_size
        return TensorSource(shape, (RowRange(first, count),), f"{name}.in_proj.weight")

    def make_experts(self, name: str) -> MixtureOfExperts:
        shared = shared_mlp(self.config, f"{name}.shared_expert", self.config.shared_expert_intermediate_size)
        return mixture(self.config, name, self.config.moe_intermediate_size, shared=shared)
