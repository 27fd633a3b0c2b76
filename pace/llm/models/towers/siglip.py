"""SigLIP: the vision tower of Gemma 3, and the blocks of several others.

An image is a grid of patches with learned positions. All rows of an image see each other. Source:
`modeling_siglip.py` and `modeling_gemma3.py` of transformers.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from pace.batch import Positions
from pace.llm.layers import (
    Attention,
    Block,
    LayerNorm,
    Linear,
    NoRotary,
    PlainMLP,
    RMSNorm,
    Rotary,
    TensorSource,
    Vectors,
)
from pace.llm.models.model_config import MAX_LAYERS, activation, checked_head_dim, count, declared, number
from pace.llm.models.towers.image_tower import ImageTower
from pace.llm.models.towers.parts import PatchEmbedding, RowLinear, RowNorm, VisionBlock, cut_patches
from pace.llm.models.towers.tower import RunSlice, rows_batch
from pace.llm.models.towers.vision_config import MAX_SIZE, VisionConfig
from pace.media.media import Media, digest_of
from pace.naming import shown


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
class SiglipVisionConfig(VisionConfig):
    """Fields of `vision_config` in config.json. A family with other defaults or more fields has a subclass."""

    model_types: ClassVar[tuple[str, ...]] = ("siglip_vision_model",)
    without_effect: ClassVar[frozenset[str]] = frozenset({"vision_use_head", "num_image_tokens", "projection_dim"})

    hidden_size: int = count(768, MAX_SIZE)
    intermediate_size: int = count(3072)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12)
    num_channels: int = count(3, 64)
    image_size: int = side(224, MAX_SIZE)
    patch_size: int = side(16, 512)
    hidden_act: str = activation("gelu_tanh")
    layer_norm_eps: float = number(1e-6, 0.0, 1.0)

    def check(self) -> None:
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
    def patch_shape(self) -> tuple[int, ...]:
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
    mlp = PlainMLP.named(f"{name}.mlp.fc1", f"{name}.mlp.fc2", size, inner, config.hidden_act, bias=True)
    norms = [LayerNorm(f"{name}.layer_norm{number}", size, config.layer_norm_eps) for number in (1, 2)]
    return Block(norms[0], attention, norms[1], mlp)


def position_table(name: str, num_positions: int, size: int) -> Vectors:
    """A table of learned positions, the tensor `name [num_positions, size]`. It is float32 `[num_positions * size]`
    once it is filled."""
    return Vectors({name: num_positions * size}, {name: TensorSource((num_positions, size))})


class SquareTower(ImageTower):
    """A tower whose images all have `image_size`. An image is float32 `[1, channels, image_size, image_size]`, the
    `features` of its medium."""

    prefix = "vision_tower."
    input_names = ("pixel_values",)
    config: SiglipVisionConfig

    @abstractmethod
    def num_tokens(self) -> int:
        """Rows for the text model of each image."""

    def patches_of(self, media: Media) -> Tensor:
        return cut_patches(torch.from_numpy(media.features), self.config.patch_size)

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        config, (images,) = self.config, self.arrays_of(inputs)
        shape = config.num_channels, config.image_size, config.image_size
        if not images.is_floating_point() or images.ndim != 4 or images.shape[1:] != shape:
            raise ValueError(
                f"pixel_values must be floats [images, {', '.join(map(str, shape))}]; got {images.dtype} "
                f"{list(images.shape)}"
            )
        return [self._media(image) for image in images.detach().float().cpu().contiguous().split(1)]

    def blank(self, num_tokens: int) -> Media:
        config = self.config
        return self._media(torch.zeros(1, config.num_channels, config.image_size, config.image_size))

    def _media(self, image: Tensor) -> Media:
        """The medium of `image [1, C, H, W]`."""
        grid = 1, self.config.patches_per_side, self.config.patches_per_side
        digest = digest_of(f"pixels {tuple(image.shape)} ", image.numpy())
        return Media("image", image.numpy(), grid, self.num_tokens(), digest)


class SiglipTower(SquareTower):
    """Patches with learned positions, blocks, and a norm."""

    def __init__(self, config: SiglipVisionConfig, placeholder: int):
        self.config = config
        self.placeholder = placeholder
        self.cache = config.cache
        size, name = config.hidden_size, "vision_tower.embeddings"
        self.patches = PatchEmbedding(f"{name}.patch_embedding", size, config.patch_shape, bias=True, positions=True)
        self.positions = position_table(f"{name}.position_embedding.weight", config.patches_per_side**2, size)
        self.blocks = [
            VisionBlock(siglip_block(f"vision_tower.encoder.layers.{index}", config), size, config.cache, None)
            for index in range(config.num_hidden_layers)
        ]
        self.norm = RowNorm(LayerNorm("vision_tower.post_layernorm", size, config.layer_norm_eps), size)

    def positions_of(self, media: Media) -> Tensor:
        return self.positions.values.view(-1, self.config.hidden_size)


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig(SiglipVisionConfig):
    """The tower's fields, and those of its projector, which are outside of `vision_config`."""

    tokens_per_side: int = 16
    """Rows of pooled patches."""
    out_hidden_size: int = 0
    """The text's hidden_size."""

    @classmethod
    def of_whole(cls, raw: Mapping[str, Any], out_hidden_size: int) -> Self:
        """Reads a config.json. Raises as `read`."""
        num_tokens = raw.get("mm_tokens_per_image", 256)
        if type(num_tokens) is not int or num_tokens < 1 or math.isqrt(num_tokens) ** 2 != num_tokens:
            raise ValueError(f"config.json: mm_tokens_per_image must be a square; got {shown(num_tokens)}")
        vision, side = cls.read(raw["vision_config"]), math.isqrt(num_tokens)
        return dataclasses.replace(vision, tokens_per_side=side, out_hidden_size=out_hidden_size)

    @property
    def pool(self) -> int:
        """Side of the square of patches that become one row; 0 if patches cannot be pooled to the tokens."""
        patches, side = self.patches_per_side, self.tokens_per_side
        pool = patches // side
        return pool if pool and patches // pool == side else 0


class Gemma3Tower(SiglipTower):
    """Neighbouring patches are pooled to their mean, normalised and projected. The projector's tensors are under
    `vision_tower.projector` here."""

    config: Gemma3VisionConfig

    def __init__(self, config: Gemma3VisionConfig, placeholder: int):
        super().__init__(config, placeholder)
        size, name = config.hidden_size, "vision_tower.projector"
        norm = RMSNorm(f"{name}.mm_soft_emb_norm", size, config.layer_norm_eps, offset=1.0)
        matrix = f"{name}.mm_input_projection"
        source = TensorSource((size, config.out_hidden_size), tensor=f"{matrix}_weight", transposed=True)
        self.projection = RowLinear(norm, {matrix: source}, size, bias=False)

    @property
    def width(self) -> int:
        return self.config.out_hidden_size

    def num_tokens(self) -> int:
        return self.config.tokens_per_side**2

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        normed = run(self.norm, rows_batch(x), ())
        grid = normed.unflatten(0, media.grid[1:])
        pooled = functional.avg_pool2d(grid.permute(2, 0, 1)[None], self.config.pool)
        return run(self.projection, rows_batch(pooled[0].flatten(1).T.contiguous()), ())
