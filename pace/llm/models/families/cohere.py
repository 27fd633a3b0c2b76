"""Command R and R7B: attention and MLP in parallel on one LayerNorm without biases, adjacent pairs rotated, scaled
logits. Command R+ normalises heads, with weights for each head. R7B (Cohere 2) has windows, and rotates only on layers
with a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Block, HeadLayerNorm, LayerNorm, NoHeadNorm
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag, number, token_ids


@dataclass(frozen=True, kw_only=True)
class CohereConfig(LlamaConfig):
    vocab_size: int = count(256000)
    hidden_size: int = count(8192)
    intermediate_size: int = count(22528)
    num_hidden_layers: int = count(40, MAX_LAYERS)
    num_attention_heads: int = count(64)
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    model_max_length: int | None = count(None, MAX_POSITIONS, optional=True)
    """Maximum training length of Command R and R+; their `max_position_embeddings` is smaller."""
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)
    logit_scale: float = number(0.0625, 1e-9, 1e9)
    use_qk_norm: bool = flag(False)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(5)
    eos_token_id: int | tuple[int, ...] | None = token_ids(255001)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    without_effect: ClassVar[dict[str, tuple]] = {"use_parallel_residual": (None, True)}
    rope_options: ClassVar[dict[str, Any]] = {"default_theta": 5e5, "interleaved": True}

    @property
    def max_length(self) -> int:
        return max(super().max_length, self.model_max_length or 0)

    @property
    def logits_scale(self) -> float:
        return self.logit_scale


class CohereForCausalLM(LlamaForCausalLM):
    Config = CohereConfig

    def make_layer(self, name: str, index: int) -> Block:
        norm = self.make_norm(f"{name}.input_layernorm")
        return Block(norm, self.make_mixer(name, index), None, self.make_feed_forward(name, index), parallel=True)

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.layer_norm_eps, bias=False)

    def make_head_norm(self, name: str, num_heads: int) -> HeadLayerNorm | NoHeadNorm:
        if not self.config.use_qk_norm:
            return NoHeadNorm()
        return HeadLayerNorm(f"{name}.weight", num_heads, self.config.head_dim, self.config.layer_norm_eps)


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(CohereConfig, WindowedConfig):
    sliding_window_pattern: int = count(4, MAX_LAYERS)

    only_here: ClassVar[dict[str, tuple]] = {
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0, 1),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    }
    without_effect: ClassVar[dict[str, tuple]] = CohereConfig.without_effect | {"use_qk_norm": (None, False)}
    also_read: ClassVar[frozenset[str]] = CohereConfig.also_read | {
        "cache_implementation",
        "layer_switch",
        "use_embedding_sharing",
        "use_parallel_embedding",
    }
    rope_options: ClassVar[dict[str, Any]] = {"interleaved": True}
    only_windows_rotate: ClassVar[bool] = True

    @property
    def full_every(self) -> int:
        return self.sliding_window_pattern


class Cohere2ForCausalLM(CohereForCausalLM):
    Config = Cohere2Config
