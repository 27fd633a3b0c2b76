"""StableLM 3B and StableLM 2: Llama with LayerNorm and a quarter of each head rotated. In the 12B both branches read
one norm, and query and key heads are normalised with weights for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Block, HeadLayerNorm, LayerNorm, NoHeadNorm, RopeConfig
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    check_divides,
    count,
    flag,
    number,
    token_ids,
)
from pace.llm.models.rope_config import check_even, read_rope


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(LlamaConfig):
    vocab_size: int = count(50304)
    hidden_size: int = count(2560)
    intermediate_size: int = count(6912)
    num_key_value_heads: int | None = count(32)
    head_dim: int | None = count(None, MAX_HEAD_DIM, optional=True)
    hidden_act: str = activation("silu")
    num_hidden_layers: int = count(32, MAX_LAYERS)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)
    use_qkv_bias: bool = flag(False)
    use_parallel_residual: bool = flag(False)
    qk_layernorm: bool = flag(False)
    head_norms_stacked: bool = flag(False)
    """True if the norms of heads are one tensor, as in GGUF files."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(0)

    only_here: ClassVar[dict[str, tuple]] = {
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    output_bias: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "hidden_size")
        if self.head_dim not in (None, self.hidden_size // self.num_attention_heads):
            raise NotImplementedError(
                f"config.json: head_dim = {self.head_dim} is not implemented for StableLm; implemented: "
                f"hidden_size / num_attention_heads = {self.hidden_size // self.num_attention_heads}"
            )

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        rope = read_rope(fields, head_dim, self.max_position_embeddings, partial=True, default_partial=0.25)
        return check_even(rope, head_dim)

    @property
    def qkv_bias(self) -> bool:
        return self.use_qkv_bias


class StableLmForCausalLM(LlamaForCausalLM):
    Config = StableLmConfig
    head_norm_names = ("q_layernorm", "k_layernorm")

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self.config.hidden_size, self.config.layer_norm_eps)

    def make_head_norm(self, name: str, num_heads: int) -> HeadLayerNorm | NoHeadNorm:
        if not self.config.qk_layernorm:
            return NoHeadNorm()
        one_each = [f"{name}.norms.{head}.weight" for head in range(num_heads)]
        tensors = f"{name}.weight" if self.config.head_norms_stacked else one_each
        return HeadLayerNorm(tensors, num_heads, self.config.head_dim, self.config.layer_norm_eps)

    def make_layer(self, name: str, index: int) -> Block:
        if not self.config.use_parallel_residual:
            return super().make_layer(name, index)
        norm = self.make_norm(f"{name}.input_layernorm")
        return Block(norm, self.make_mixer(name, index), None, self.make_feed_forward(name, index), parallel=True)
