"""The text part of Llama 4 (Scout, Maverick), and MobileLLM-R1, which is the same without experts. Some layers rotate
and see a chunk of positions; the others see all positions and do not rotate. Each token has one expert, whose weight
multiplies its input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pace.llm.layers import Attention, FeedForward, HeadUnitNorm, Rotary, Temperature
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.mixture_config import MixtureConfig, layer_numbers, mixture, shared_mlp
from pace.llm.models.families.unrotated import UnrotatedConfig
from pace.llm.models.layer_types import CHUNKED, FULL, check_layer_types, layer_types
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, declared, flag, number
from pace.ops.experts import MAX_EXPERTS, Router


def switch(default: bool) -> Any:
    """A boolean; in early checkpoints a number, where 0 is false."""

    def read(value: Any) -> bool:
        if type(value) not in (bool, int):
            raise ValueError("true or false")
        return bool(value)

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class Llama4Config(MixtureConfig, UnrotatedConfig):
    vocab_size: int = count(202048)
    hidden_size: int = count(5120)
    intermediate_size: int = count(8192)
    """Width of experts."""
    intermediate_size_mlp: int = count(16384)
    """Width of the MLP in layers without experts."""
    num_hidden_layers: int = count(48, MAX_LAYERS)
    num_attention_heads: int = count(40)
    num_key_value_heads: int | None = count(8, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(4096 * 32, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    num_experts: int = count(16, MAX_EXPERTS, minimum=0)
    num_experts_per_tok: int = count(1, MAX_EXPERTS, minimum=0)
    moe_layers: tuple[int, ...] | None = layer_numbers(None)
    interleave_moe_layer_step: int = count(1, MAX_LAYERS, minimum=0)
    use_qk_norm: bool = flag(True)
    layer_types: tuple[str, ...] | None = layer_types((FULL, CHUNKED))
    attention_chunk_size: int | None = count(8192, MAX_POSITIONS, optional=True)
    attn_temperature_tuning: bool = switch(True)
    floor_scale: int = count(8192, MAX_POSITIONS)
    attn_scale: float = number(0.1, -1e3, 1e3)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    also_read: ClassVar[frozenset[str]] = UnrotatedConfig.also_read | {"cache_implementation", "for_llm_compressor"}
    beside_text: ClassVar[frozenset[str]] = frozenset(
        {"vision_config", *(f"{name}_token_{kind}" for name in ("boi", "eoi", "image") for kind in ("index", "id"))}
    )
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 5e5, "interleaved": True}

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)
        if self.attention_chunk_size is None and CHUNKED in (self.layer_types or (CHUNKED,)):
            raise ValueError("config.json: attention_chunk_size is null, but there are layers of chunked_attention")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        found = super().derived(fields)
        types = tuple(CHUNKED if rotates else FULL for rotates in found["no_rope_layers"][: self.num_hidden_layers])
        return found | {"layer_types": self.layer_types or types, "moe_layers": self.layers_with_experts}

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        step = self.interleave_moe_layer_step
        if self.moe_layers is not None:
            return self.moe_layers
        if step == 0:
            raise ValueError("interleave_moe_layer_step is 0, and moe_layers does not say which layers have experts")
        return tuple(range(step - 1, self.num_hidden_layers, step))

    @property
    def router(self) -> Router | None:
        if not self.layers_with_experts:
            return None
        return Router(self.num_experts, self.num_experts_per_tok, "sigmoid_of_chosen")

    def window(self, layer: int) -> int | None:
        return self.attention_chunk_size if self.layer_types[layer] == CHUNKED else None


class Llama4ForConditionalGeneration(LlamaForCausalLM):
    """Llama 4 for text; `Llama4ForCausalLM` is the same model."""

    Config = Llama4Config
    norm_last = True
    text_prefixes: ClassVar[dict[str, str]] = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
    other_parts = ("vision_model.", "multi_modal_projector.")

    def make_rotaries(self) -> tuple[Rotary | Temperature, ...]:
        config = self.config
        if not config.attn_temperature_tuning or all(config.no_rope_layers):
            return super().make_rotaries()
        tuning = Temperature(config.head_dim, config.floor_scale, config.attn_scale, table=1)
        return (*super().make_rotaries(), tuning)

    def make_attention(self, name: str, index: int) -> Attention:
        config, attention = self.config, super().make_attention(name, index)
        attention.cache = replace(attention.cache, chunked=config.window(index) is not None)
        if not config.no_rope_layers[index] and config.attn_temperature_tuning:
            attention.temperature = self.rotaries[1]
        if config.no_rope_layers[index] and config.use_qk_norm:
            attention.query_norm = attention.key_norm = HeadUnitNorm(config.head_dim, config.rms_norm_eps)
        return attention

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config, mlp, inner = self.config, f"{name}.feed_forward", self.config.intermediate_size
        if index not in config.moe_layers:
            return self.make_mlp(mlp, config.intermediate_size_mlp)
        shared = shared_mlp(config, f"{mlp}.shared_expert", inner)
        return mixture(config, mlp, inner, "router", transposed=True, shared=shared, weigh_inputs=True)
