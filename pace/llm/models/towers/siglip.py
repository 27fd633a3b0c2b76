"""SigLIP: the vision tower of Gemma 3, and the blocks of several others.

An image is a grid of patches with learned positions. All rows of an image see each other. Source:
`modeling_siglip.py` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from pace.batch import Positions
from pace.llm.layers import Attention, Block, LayerNorm, Linear, NoRotary, PlainMLP, Rotary, TensorSource, Vectors
from pace.llm.models.model_config import MAX_LAYERS, activation, checked_head_dim, count, declared, number, read_declared
from pace.naming import shown

MAX_SIZE = 2**16
"""Maximum hidden_size of a tower. The largest known is below 2^13."""


def side(default: int, maximum: int) -> Any:
    """A side of a square in pixels, as one number or as two equal ones."""

    def read(value: Any) -> int:
        sides = value if isinstance(value, list) and len(value) == 2 else [value] * 2
        if any(type(one) is not int or not 1 <= one <= maximum for one in sides):
            raise ValueError(f"an integer in 1..{maximum}, or a list of two")
        if sides[0] != sides[1]:
            raise NotImplementedError(f"{shown(value)} is not implemented; implemented: two equal sides")
        return sides[0]

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class SiglipVisionConfig:
    """Fields of `vision_config` in config.json. A family with other defaults or more fields has a subclass."""

    hidden_size: int = count(768, MAX_SIZE)
    intermediate_size: int = count(3072)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    num_channels: int = count(3, 64)
    image_size: int = side(224, MAX_SIZE)
    patch_size: int = side(16, 512)
    hidden_act: str = activation("gelu_tanh")
    layer_norm_eps: float = number(1e-6, 0.0, 1.0)

    @classmethod
    def read(cls, fields: Any) -> Self:
        """Raises ValueError or NotImplementedError for a field that is wrong, or that the tower does not implement."""
        if not isinstance(fields, dict):
            raise ValueError(f"config.json: vision_config must be an object; got {shown(fields)}")
        config = cls(**read_declared(cls, fields, "vision_config."))
        config.check()
        return config

    def check(self) -> None:
        """Raises ValueError if fields contradict each other."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                "config.json: vision_config.hidden_size must be a multiple of num_attention_heads; got "
                f"{self.hidden_size} and {self.num_attention_heads} heads"
            )
        checked_head_dim(self.head_dim)
        if self.image_size < self.patch_size:
            raise ValueError(
                "config.json: vision_config.image_size must be at least patch_size; got "
                f"{self.image_size} and {self.patch_size}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def cache(self) -> Positions:
        """What a block keeps of each patch."""
        return Positions(self.num_attention_heads, self.head_dim, self.head_dim)

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of a patch."""
        return self.num_channels, self.patch_size, self.patch_size

    @property
    def patches_per_side(self) -> int:
        """Patches on a side of an image of `image_size`."""
        return self.image_size // self.patch_size


def siglip_block(name: str, config: SiglipVisionConfig, rotary: Rotary | None = None) -> Block:
    """A block with layer norms, biases in all products, and a plain MLP: the tensors `{name}.layer_norm1`,
    `{name}.self_attn.q_proj` and so on. Heads are not rotated without `rotary`."""
    size, inner = config.hidden_size, config.intermediate_size
    attention = Attention(
        Linear({f"{name}.self_attn.{part}_proj": size for part in "qkv"}, size, True),
        Linear({f"{name}.self_attn.out_proj": size}, size, True),
        config.num_attention_heads,
        config.cache,
        rotary or NoRotary(),
    )
    mlp = PlainMLP(
        Linear({f"{name}.mlp.fc1": inner}, size, True), Linear({f"{name}.mlp.fc2": size}, inner, True), config.hidden_act
    )
    norms = [LayerNorm(f"{name}.layer_norm{number}", size, config.layer_norm_eps) for number in (1, 2)]
    return Block(norms[0], attention, norms[1], mlp)


def position_table(name: str, num_positions: int, size: int) -> Vectors:
    """A table of learned positions, the tensor `name [num_positions, size]`. It is float32 `[num_positions * size]`
    once it is filled."""
    return Vectors({name: num_positions * size}, {name: TensorSource((num_positions, size))})
