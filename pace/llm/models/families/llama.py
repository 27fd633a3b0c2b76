"""LLaMA 1 to 3.3, and checkpoints of the same architecture: SmolLM, TinyLlama, Yi and many more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.batch import Positions
from pace.llm.layers import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    GatedLinear,
    GatedMLP,
    HeadLayerNorm,
    HeadNorm,
    LayerNorm,
    Linear,
    Mixer,
    MixtureOfExperts,
    NoHeadNorm,
    NoNorm,
    NoRotary,
    RMSNorm,
    RopeConfig,
    Rotary,
    Temperature,
    UnitNorm,
)
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    ModelConfig,
    activation,
    check_divides,
    checked_head_dim,
    count,
    flag,
    number,
    token_ids,
)
from pace.llm.models.mtp import MultiTokenForCausalLM
from pace.llm.models.rope_config import ROPE_FIELDS, longest_sequence, read_rope
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    hidden_size: int = count(4096)
    intermediate_size: int = count(11008)
    num_hidden_layers: int = count(32, MAX_LAYERS)
    num_attention_heads: int = count(32)
    num_key_value_heads: int | None = count(None, optional=True)
    head_dim: int | None = count(None, MAX_HEAD_DIM, optional=True)
    hidden_act: str = activation("silu")
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    attention_bias: bool = flag(False)
    mlp_bias: bool = flag(False)
    bos_token_id: int | tuple[int, ...] | None = token_ids(1)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)
    rope: RopeConfig | None = None
    """None if no layer rotates."""

    only_here: ClassVar[dict[str, tuple]] = {
        "qk_layernorm": (False, None),
        "use_qk_norm": (False, None),
    }
    also_read: ClassVar[frozenset[str]] = frozenset(ROPE_FIELDS)
    floors_head_dim: ClassVar[bool] = False
    """True if a head_dim that is not given is rounded down, like in `transformers`; hidden_size then need not be a
    multiple of num_attention_heads."""
    rope_options: ClassVar[dict[str, Any]] = {}
    """Arguments of `read_rope`, such as the architecture's default base."""

    def check(self) -> None:
        if self.head_dim is None and not self.floors_head_dim:
            check_divides(self, "num_attention_heads", "hidden_size")
        if self.num_key_value_heads is not None:
            check_divides(self, "num_key_value_heads", "num_attention_heads")

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        head_dim = self.head_dim or checked_head_dim(self.hidden_size // self.num_attention_heads)
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        return {"head_dim": head_dim, "num_key_value_heads": kv_heads, "rope": self.read_rope(fields, head_dim)}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig | None:
        return read_rope(fields, head_dim, self.max_position_embeddings, **self.rope_options)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotations of the layers."""
        return () if self.rope is None else (self.rope,)

    @property
    def max_length(self) -> int:
        return super().max_length if self.rope is None else longest_sequence(self.rope)

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.attention_bias

    @property
    def branch_scale(self) -> float:
        """Factor of a branch's output, before it is added."""
        return 1.0

    @property
    def attention_scale(self) -> float | None:
        """Factor of the scores; None for `head_dim ** -0.5`."""
        return None

    @property
    def attention_softcap(self) -> float | None:
        """Cap of the scores; None for no cap."""
        return None

    @property
    def clip(self) -> float | None:
        """Limit of the elements of queries, keys and values; None for no limit."""
        return None

    def heads(self, layer: int) -> int:
        """Number of query heads of a layer."""
        return self.num_attention_heads

    def window(self, layer: int) -> int | None:
        """Number of positions that the attention of a layer sees, the current one included; None for all."""
        return None

    def rotation(self, layer: int) -> int | None:
        """Index into `ropes` of the rotation of a layer; None for a layer that does not rotate."""
        return 0 if self.ropes else None

    def has_experts(self, layer: int) -> bool:
        """True if the feed-forward of a layer is a mixture of experts."""
        return False


class LlamaForCausalLM(MultiTokenForCausalLM):
    Config = LlamaConfig
    qkv_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    """The tensors that hold the rows of queries, keys and values: three, or one for all."""
    gate_up_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """The norms of the inputs of a layer's two branches; () for none."""
    post_norm_names: ClassVar[tuple[str, ...]] = ()
    """The norms of their outputs, before they are added; () for none."""
    head_norm: ClassVar[bool] = False
    """True if query and key heads are normalised."""
    head_norm_names: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    norm_last: ClassVar[bool] = False
    """True if they are normalised after they are rotated."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.rotaries = self.make_rotaries()
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [self.make_layer(f"model.layers.{i}", i) for i in range(config.num_hidden_layers)]
        self.final_norm = self.make_norm("model.norm")
        self.lm_head = self.make_head(config.hidden_size)

    def make_rotaries(self) -> tuple[Rotary | Temperature, ...]:
        return tuple(Rotary(rope, table) for table, rope in enumerate(self.config.ropes))

    def make_layer(self, name: str, index: int) -> Block:
        norms = [self.make_norm(f"{name}.{norm}") for norm in self.norm_names] or [NoNorm(), NoNorm()]
        post_norms = [self.make_norm(f"{name}.{norm}") for norm in self.post_norm_names] or [None, None]
        return Block(
            norms[0],
            self.make_mixer(name, index),
            norms[1],
            self.make_feed_forward(name, index),
            mixer_post_norm=post_norms[0],
            mlp_post_norm=post_norms[1],
            branch_scale=self.config.branch_scale,
        )

    def make_mixer(self, name: str, index: int) -> Mixer:
        """Makes the mixer of a layer."""
        return self.make_attention(f"{name}.self_attn", index)

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        """Makes the feed-forward of a layer."""
        mlp = f"{name}.mlp"
        return self.make_experts(mlp) if self.config.has_experts(index) else self.make_mlp(mlp)

    def make_norm(self, name: str) -> RMSNorm | LayerNorm | UnitNorm:
        return RMSNorm(name, self.config.hidden_size, self.config.rms_norm_eps)

    def make_attention(self, name: str, index: int) -> Attention:
        config = self.config
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.heads(index), config.num_key_value_heads
        rows = [heads * dim, kv_heads * dim, kv_heads * dim]
        return Attention(
            Linear(parts(name, self.qkv_names, rows), hidden, config.qkv_bias),
            Linear({f"{name}.o_proj": hidden}, heads * dim, config.output_bias),
            heads,
            Positions(kv_heads, dim, dim, config.window(index)),
            self.rotary(index),
            self.make_head_norm(f"{name}.{self.head_norm_names[0]}", heads),
            self.make_head_norm(f"{name}.{self.head_norm_names[1]}", kv_heads),
            config.attention_scale,
            config.attention_softcap,
            self.norm_last,
            clip=config.clip,
        )

    def make_head_norm(self, name: str, num_heads: int) -> HeadNorm | HeadLayerNorm | NoHeadNorm:
        """Makes the norm of query heads or of key heads."""
        return HeadNorm(name, self.config.head_dim, self.config.rms_norm_eps) if self.head_norm else NoHeadNorm()

    def rotary(self, layer: int) -> Rotary | NoRotary:
        """Returns the rotation of a layer's heads."""
        index = self.config.rotation(layer)
        return NoRotary() if index is None else self.rotaries[index]

    def make_mlp(self, name: str, inner: int | None = None) -> GatedMLP:
        """`inner`: its width, by default the config's `intermediate_size`."""
        config = self.config
        inner = inner or config.intermediate_size
        return GatedMLP(
            GatedLinear(parts(name, self.gate_up_names, [inner] * 2), config.hidden_size, config.mlp_bias),
            Linear({f"{name}.down_proj": config.hidden_size}, inner, config.mlp_bias),
            config.hidden_act,
        )

    def make_experts(self, name: str) -> MixtureOfExperts:
        """Makes the mixture of experts of a layer."""
        raise NotImplementedError


def parts(name: str, tensors: tuple[str, ...], rows: list[int]) -> dict[str, int]:
    """Rows by tensor: one tensor each, or a single tensor with all rows in this order."""
    if len(tensors) == 1:
        return {f"{name}.{tensors[0]}": sum(rows)}
    return {f"{name}.{tensor}": count for tensor, count in zip(tensors, rows, strict=True)}
