"""The vision tower of Idefics3 and SmolVLM: SigLIP on tiles, and a projection of joined patches.

Source: `modeling_idefics3.py` and `modeling_smolvlm.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.llm.layers import NoNorm
from pace.llm.models.model_config import MAX_LAYERS, count
from pace.llm.models.towers.parts import RowLinear, join_patches
from pace.llm.models.towers.siglip import MAX_SIZE, SiglipTower, SiglipVisionConfig, side
from pace.llm.models.towers.tower import RunSlice, rows_batch
from pace.media.media import Media, digest_of
from pace.naming import shown

MAX_SCALE = 64
"""Maximum `scale_factor`; known are 2 to 4."""


@dataclass(frozen=True, kw_only=True)
class Idefics3VisionConfig(SiglipVisionConfig):
    """Fields of `vision_config`, and those about the tower outside of it."""

    model_types: ClassVar[tuple[str, ...]] = (
        *("idefics3", "idefics3_vision", "smolvlm_vision"),
        *SiglipVisionConfig.model_types,
    )
    without_effect: ClassVar[frozenset[str]] = SiglipVisionConfig.without_effect | {
        *("max_image_size", "size", "tie_word_embeddings", "use_base_siglip"),
    }

    hidden_size: int = count(1152, MAX_SIZE)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(16)
    patch_size: int = side(32, 512)
    scale_factor: int = 2
    """Side of the square of patches that becomes one row."""
    keeps_first: bool = False
    """True if the first tile counts even if all tiles are zeros."""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Idefics3VisionConfig:
        """Reads a config.json. Raises ValueError or NotImplementedError for a field that is wrong, or that the tower
        does not implement."""
        factor = raw.get("scale_factor", 2)
        if type(factor) is not int or not 1 <= factor <= MAX_SCALE:
            raise ValueError(f"config.json: scale_factor must be an integer in 1..{MAX_SCALE}; got {shown(factor)}")
        is_smolvlm = raw.get("model_type") == "smolvlm"
        return replace(cls.read(raw.get("vision_config")), scale_factor=factor, keeps_first=is_smolvlm)


class Idefics3Tower(SiglipTower):
    """Tiles are squares, most often of `image_size`. Media have their pixels, float32 `[T, C, S, S]`. The projector's
    tensors, `connector` in the checkpoint, are under `vision_tower.connector` here."""

    input_names = ("pixel_values", "pixel_attention_mask")
    config: Idefics3VisionConfig

    def __init__(self, config: Idefics3VisionConfig, width: int, placeholder: int):
        """`width`: the text's hidden_size."""
        super().__init__(config, placeholder)
        self.width = width
        joined = config.hidden_size * config.scale_factor**2
        target = {"vision_tower.connector.modality_projection.proj": width}
        self.projector = RowLinear(NoNorm(), target, joined, bias=False)

    def num_tokens(self) -> int:
        return (self.config.patches_per_side // self.config.scale_factor) ** 2

    def positions_of(self, media: Media) -> Tensor:
        tiles, rows, columns = media.grid
        table_side = self.config.patches_per_side
        at = nearest(rows, table_side)[:, None] * table_side + nearest(columns, table_side)
        return super().positions_of(media)[at.flatten()].repeat(tiles, 1)

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        joined = join_patches(run(self.norm, rows_batch(x), ()), media.grid, self.config.scale_factor)
        return run(self.projector, rows_batch(joined), ())

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        """Makes a medium of each tile: which of them are of one image, the arrays do not say. Tiles of zeros fill
        prompts with fewer tiles than others, and are left out."""
        pixels, mask = (inputs.get(name) for name in self.input_names)
        if pixels is None:
            raise ValueError("images are given as pixel_values and pixel_attention_mask; pixel_values is missing")
        pixels = torch.as_tensor(pixels)
        config = self.config
        step = config.patch_size * config.scale_factor
        shape = pixels.shape
        if (
            not pixels.is_floating_point()
            or len(shape) != 5
            or shape[2:] != (config.num_channels, shape[-1], shape[-1])
            or not shape[-1] // config.patch_size
            or shape[-1] // config.patch_size % config.scale_factor
        ):
            raise ValueError(
                f"pixel_values must be floats [prompts, tiles, {config.num_channels}, S, S] with S // "
                f"{config.patch_size} in multiples of {config.scale_factor}, such as S = {step}; got {pixels.dtype} "
                f"{list(shape)}"
            )
        tiles = pixels.detach().float().cpu().flatten(0, 1)
        is_real = (tiles != 0).flatten(1).any(1)
        if config.keeps_first and len(is_real) and not is_real.any():
            is_real[0] = True
        if mask is not None:
            mask = torch.as_tensor(mask)
            if mask.shape != (*shape[:2], *shape[3:]):
                raise ValueError(
                    f"pixel_attention_mask must be {[*shape[:2], *shape[3:]]}, as pixel_values; got {list(mask.shape)}"
                )
            if not mask.flatten(0, 1)[is_real.to(mask.device)].bool().all():
                raise NotImplementedError("pixel_attention_mask must be ones for all tiles but those of zeros")
        return [self._media(tile[None].contiguous()) for tile in tiles[is_real]]

    def blank(self, num_tokens: int) -> Media:
        config = self.config
        side = config.patches_per_side // config.scale_factor * config.scale_factor
        tiles = max(1, num_tokens // self.num_tokens())
        features = np.zeros((tiles, config.num_channels, *(side * config.patch_size,) * 2), np.float32)
        return Media("image", features, (tiles, side, side), tiles * self.num_tokens(), b"")

    def _media(self, tile: Tensor) -> Media:
        features, side = tile.numpy(), tile.shape[-1] // self.config.patch_size
        digest = digest_of(f"tile {features.shape} ", features)
        num_tokens = (side // self.config.scale_factor) ** 2
        return Media("image", features, (1, side, side), num_tokens, digest)


def nearest(count: int, side: int) -> Tensor:
    """int64 `[count]`: the positions in a table of `side` positions that are nearest to `count` equal steps from below.
    Computed in float32 as in transformers, because positions may be at a boundary."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    places = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1 - 1e-6)
    return torch.bucketize(places, boundaries, right=True)
