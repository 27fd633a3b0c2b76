"""The vision tower of Mistral 3 and Pixtral.

An image is a grid of patches of any shape. Its rows see each other, and turn by their row and column. Source:
`modeling_pixtral.py` and `modeling_mistral3.py` of transformers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.llm.layers import (
    Attention,
    Block,
    GatedLinear,
    GatedMLP,
    Linear,
    NoNorm,
    RMSNorm,
    RopeConfig,
    Rotary,
)
from pace.llm.layers.rotary import Angles
from pace.llm.models.model_config import MAX_LAYERS, activation, count, declared, number, read_number
from pace.llm.models.towers.image_tower import ImageTower
from pace.llm.models.towers.parts import PatchEmbedding, RowLinear, RowMLP, RowNorm, VisionBlock, cut_patches
from pace.llm.models.towers.projector import PROJECTOR, ProjectorConfig
from pace.llm.models.towers.siglip import MAX_SIZE, SiglipVisionConfig, side
from pace.llm.models.towers.tower import RunSlice, near_square, rows_batch
from pace.media.media import Media, digest_of
from pace.naming import shown

EPS = 1e-5
"""Added to the mean square in the tower's norms; it is not in the config."""
BLOCKS = "vision_tower.transformer.layers"


def axial_rope() -> Any:
    """The object of the rotation: its base, or None for the base at the top."""

    def read(value: Any) -> float | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError("an object or null")
        for name, allowed in (("rope_type", ("axial", "default")), ("partial_rotary_factor", (None, 1.0))):
            if name in value and value[name] not in allowed:
                raise NotImplementedError(
                    f"{name} = {shown(value[name])} is not implemented; implemented: {', '.join(map(str, allowed))}"
                )
        return read_number(value["rope_theta"], 1e-3, 1e30) if value.get("rope_theta") is not None else None

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class PixtralVisionConfig(SiglipVisionConfig):
    """Fields of `vision_config` in config.json."""

    model_types: ClassVar[tuple[str, ...]] = ("pixtral",)
    without_effect: ClassVar[frozenset[str]] = SiglipVisionConfig.without_effect | {
        *("head_dim", "is_composition", "tie_word_embeddings", "vocab_size")
    }

    hidden_size: int = count(1024, MAX_SIZE)
    intermediate_size: int = count(4096)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(16)
    image_size: int = side(1024, MAX_SIZE)
    """Side of the largest image; the processor's settings count."""
    hidden_act: str = activation("gelu")
    rope_theta: float = number(10000.0, 1e-3, 1e30)
    rope_parameters: float | None = axial_rope()

    def check(self) -> None:
        super().check()
        if self.head_dim % 2:
            raise ValueError(
                "config.json: vision_config.hidden_size / num_attention_heads must be even; got "
                f"{self.hidden_size} and {self.num_attention_heads} heads"
            )

    @property
    def theta(self) -> float:
        """Base of the rotation."""
        return self.rope_theta if self.rope_parameters is None else self.rope_parameters


class PixtralTower(ImageTower):
    """RMS norms, gated MLPs, and a norm before the first block. An image is float32 `[1, channels, H, W]`, the
    `features` of its medium. H and W are multiples of a patch."""

    prefix = "vision_tower."
    input_names = ("pixel_values", "image_sizes")

    def __init__(self, config: PixtralVisionConfig, projector: ProjectorConfig, placeholder: int):
        self.config = config
        self.projector = projector
        self.placeholder = placeholder
        self.cache = config.cache
        size = config.hidden_size
        self.rotary = Rotary(RopeConfig("default", config.theta, config.head_dim, 2))
        self.feature_layers = projector.layers(config.num_hidden_layers)
        self.patches = PatchEmbedding("vision_tower.patch_conv", size, config.patch_shape, bias=False, positions=False)
        self.norm = RowNorm(RMSNorm("vision_tower.ln_pre", size, EPS), size)
        self.blocks = [
            VisionBlock(self.make_block(f"{BLOCKS}.{index}"), size, self.cache, config.head_dim // 2)
            for index in range(max(self.feature_layers))
        ]
        self.unused = projector.unused(BLOCKS, config.num_hidden_layers)

    def make_block(self, name: str) -> Block:
        config = self.config
        size, inner = config.hidden_size, config.intermediate_size
        attention = Attention(
            Linear({f"{name}.attention.{part}_proj": size for part in "qkv"}, size),
            Linear({f"{name}.attention.o_proj": size}, size),
            config.num_attention_heads,
            config.cache,
            self.rotary,
        )
        mlp = GatedMLP(
            GatedLinear({f"{name}.feed_forward.{part}_proj": inner for part in ("gate", "up")}, size),
            Linear({f"{name}.feed_forward.down_proj": size}, inner),
            config.hidden_act,
        )
        norms = [RMSNorm(f"{name}.{norm}_norm", size, EPS) for norm in ("attention", "ffn")]
        return Block(norms[0], attention, norms[1], mlp)

    @property
    def width(self) -> int:
        return self.projector.out_hidden_size

    @property
    @abstractmethod
    def merge(self) -> int:
        """Side of the square of patches that becomes one row for the text model."""

    # -- a run

    def patches_of(self, media: Media) -> Tensor:
        return cut_patches(torch.from_numpy(media.features), self.config.patch_size)

    def enter(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        return run(self.norm, rows_batch(x), ())

    def angles_of(self, media: Media) -> Angles:
        """A head has D / 2 pairs, with frequencies from fast to slow. Those with even numbers turn with the row, and
        come first; the others turn with the column."""
        _, rows, columns = media.grid
        row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
        of_rows, of_columns = self.rotary.angles(row, row), self.rotary.angles(column, column)
        cos, sin = [torch.cat([r[:, 0::2], c[:, 1::2]], 1) for r, c in zip(of_rows, of_columns)]
        return ((cos, sin),)

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        images, sizes = self.arrays_of(inputs)
        channels, unit = self.config.num_channels, self.config.patch_size * self.merge
        if not images.is_floating_point() or images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"pixel_values must be floats [images, {channels}, H, W]; got {images.dtype} {list(images.shape)}"
            )
        if sizes.is_floating_point() or sizes.shape != (len(images), 2):
            raise ValueError(
                f"image_sizes must be integers [{len(images)}, 2], the height and width of each image; got "
                f"{sizes.dtype} {list(sizes.shape)}"
            )
        for index, (height, width) in enumerate(sizes.tolist()):
            too_large = height > images.shape[2] or width > images.shape[3]
            if too_large or min(height, width) < unit or height % unit or width % unit:
                raise ValueError(
                    f"image_sizes of image {index} must be multiples of {unit} up to {list(images.shape[2:])}, the "
                    f"size of pixel_values; got {[height, width]}"
                )
        images = images.detach().float().cpu()
        return [
            self._media(image[None, :, :height, :width].contiguous().numpy())
            for image, (height, width) in zip(images, sizes.tolist())
        ]

    def blank(self, num_tokens: int) -> Media:
        rows, columns = near_square(num_tokens)
        grid = 1, rows * self.merge, columns * self.merge
        sides = (side * self.config.patch_size for side in grid[1:])
        features = np.zeros((1, self.config.num_channels, *sides), np.float32)
        return Media("image", features, grid, num_tokens, b"", runs_of(rows, columns))

    def _media(self, image: np.ndarray) -> Media:
        """The medium of `image [1, C, H, W]`."""
        rows, columns = (side // self.config.patch_size for side in image.shape[2:])
        digest = digest_of(f"pixels {image.shape} ", image)
        runs = runs_of(rows // self.merge, columns // self.merge)
        return Media("image", image, (1, rows, columns), sum(runs), digest, runs)


def runs_of(rows: int, columns: int) -> tuple[int, ...]:
    """Runs of placeholders of an image: each row of tokens ends with another token."""
    return (columns,) * rows


class Mistral3Tower(PixtralTower):
    """Patches are normalised, and those of a square become one by a product; then two more products."""

    def __init__(self, config: PixtralVisionConfig, projector: ProjectorConfig, placeholder: int):
        super().__init__(config, projector, placeholder)
        size, merged = config.hidden_size, config.hidden_size * self.merge**2
        self.patch_norm = RowNorm(RMSNorm(f"{PROJECTOR}.norm", size, projector.eps), size)
        self.merger = RowLinear(NoNorm(), {f"{PROJECTOR}.patch_merger.merging_layer": size}, merged, bias=False)
        self.mlp = projector.make_mlp(size)

    @property
    def merge(self) -> int:
        return self.projector.spatial_merge_size

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        _, rows, columns = media.grid
        x = run(self.patch_norm, rows_batch(x), ())
        squares = x.view(rows // self.merge, self.merge, columns // self.merge, self.merge, -1)
        # A merged row has the places of a square next to each other, for each element of a patch.
        merged = squares.permute(0, 2, 4, 1, 3).reshape(-1, self.merger.size)
        return run(self.mlp, rows_batch(run(self.merger, rows_batch(merged), ())), ())


class LlavaPixtralTower(PixtralTower):
    """The tower of Pixtral: each patch becomes a row, by two products."""

    merge = 1

    def __init__(self, config: PixtralVisionConfig, projector: ProjectorConfig, placeholder: int):
        super().__init__(config, projector, placeholder)
        self.mlp: RowMLP = projector.make_mlp(config.hidden_size * len(self.feature_layers))

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        return run(self.mlp, rows_batch(x), ())
