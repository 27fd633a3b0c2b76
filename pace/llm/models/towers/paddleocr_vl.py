"""The vision tower of PaddleOCR-VL: SigLIP with rotated heads on images of any size, and a projection of joined
patches.

Source: `modeling_paddleocr_vl.py` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.llm.layers import LayerNorm, NoNorm, RopeConfig, Rotary
from pace.llm.layers.rotary import Angles
from pace.llm.models.model_config import MAX_LAYERS, count
from pace.llm.models.towers.image_tower import ImageTower
from pace.llm.models.towers.parts import PatchEmbedding, RowMLP, RowNorm, VisionBlock, join_patches, resized_table
from pace.llm.models.towers.siglip import MAX_SIZE, SiglipVisionConfig, position_table, side, siglip_block
from pace.llm.models.towers.tower import RunSlice, near_square, rows_batch
from pace.llm.models.towers.vision_config import axial_theta
from pace.media.media import Media, digest_of

PROJECTOR_EPS = 1e-5
"""Added to the variance in the projector's norm; not in the config."""


@dataclass(frozen=True, kw_only=True)
class PaddleOCRVisionConfig(SiglipVisionConfig):
    """Fields of `vision_config`, and the width of the text."""

    model_types: ClassVar[tuple[str, ...]] = ("paddleocr_vl_vision", "paddleocr_vl")
    without_effect: ClassVar[frozenset[str]] = frozenset({"temporal_patch_size", "tokens_per_second"})
    """Fields about video."""

    hidden_size: int = count(1152, MAX_SIZE)
    intermediate_size: int = count(4304)
    num_hidden_layers: int = count(27, MAX_LAYERS)
    num_attention_heads: int = count(16)
    image_size: int = side(384, MAX_SIZE)
    patch_size: int = side(14, 512)
    spatial_merge_size: int = count(2, 8)
    rope_parameters: float = axial_theta()
    out_hidden_size: int = 0
    """The text's hidden_size."""

    def check(self) -> None:
        super().check()
        if self.head_dim % 4:
            raise ValueError(
                "config.json: vision_config.hidden_size must be a multiple of 4 * num_attention_heads; got "
                f"{self.hidden_size} and {self.num_attention_heads} heads"
            )


class PaddleOCRTower(ImageTower):
    """The table of positions is resized to the grid of an image. The projector's tensors are under `visual.projector`
    here."""

    prefix = "visual."
    input_names = ("pixel_values", "image_grid_thw")

    def __init__(self, config: PaddleOCRVisionConfig, placeholder: int):
        self.config = config
        self.placeholder = placeholder
        self.cache = config.cache
        # The first half of a head's pairs turns with the row, the other with the column.
        self.rotary = Rotary(RopeConfig("default", config.rope_parameters, config.head_dim // 2, 2))
        size, name = config.hidden_size, "visual.vision_model"
        embeddings = f"{name}.embeddings"
        self.patches = PatchEmbedding(f"{embeddings}.patch_embedding", size, config.patch_shape, True, positions=True)
        self.positions = position_table(f"{embeddings}.position_embedding.weight", config.patches_per_side**2, size)
        blocks = [
            siglip_block(f"{name}.encoder.layers.{i}", config, self.rotary) for i in range(config.num_hidden_layers)
        ]
        self.blocks = [VisionBlock(block, size, config.cache, config.head_dim // 2) for block in blocks]
        self.norm = RowNorm(LayerNorm(f"{name}.post_layernorm", size, config.layer_norm_eps), size)
        name, joined = "visual.projector", size * config.spatial_merge_size**2
        self.patch_norm = RowNorm(LayerNorm(f"{name}.pre_norm", size, PROJECTOR_EPS), size)
        self.projector = RowMLP(
            NoNorm(), {f"{name}.linear_1": joined}, {f"{name}.linear_2": config.out_hidden_size}, joined, "gelu"
        )

    @property
    def width(self) -> int:
        return self.config.out_hidden_size

    def positions_of(self, media: Media) -> Tensor:
        table = self.positions.values.view(-1, self.config.hidden_size)
        return resized_table(table, self.config.patches_per_side, *media.grid[1:])

    def angles_of(self, media: Media) -> Angles:
        _, rows, columns = media.grid
        places = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
        of_rows, of_columns = [self.rotary.angles(axis, axis) for axis in places]
        cos, sin = [torch.cat(pair, 1) for pair in zip(of_rows, of_columns)]
        return ((cos, sin),)

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        for norm in (self.norm, self.patch_norm):
            x = run(norm, rows_batch(x), ())
        return run(self.projector, rows_batch(join_patches(x, media.grid, self.config.spatial_merge_size)), ())

    def angle_offsets(self, media: Media) -> tuple[np.ndarray, int]:
        merge = self.config.spatial_merge_size
        grid = 1, media.grid[1] // merge, media.grid[2] // merge
        return np.indices(grid).reshape(3, -1), max(grid)

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        patches, grids = self.arrays_of(inputs)
        grids, merge = grids.reshape(-1, 3).tolist(), self.config.spatial_merge_size
        for index, (frames, rows, columns) in enumerate(grids):
            if frames != 1 or min(rows, columns) < merge or rows % merge or columns % merge:
                raise ValueError(
                    f"image_grid_thw of image {index} must be one frame, and rows and columns in multiples of {merge}; "
                    f"got {[frames, rows, columns]}"
                )
        shape = sum(map(math.prod, grids)), *self.config.patch_shape
        if not patches.is_floating_point() or patches.shape != shape:
            raise ValueError(
                f"pixel_values must be floats {list(shape)}, the patches of image_grid_thw; got {patches.dtype} "
                f"{list(patches.shape)}"
            )
        pieces = patches.detach().float().cpu().flatten(1).split([math.prod(grid) for grid in grids])
        return [self._media(piece.contiguous().numpy(), tuple(grid)) for piece, grid in zip(pieces, grids)]

    def blank(self, num_tokens: int) -> Media:
        (rows, columns), merge = near_square(num_tokens), self.config.spatial_merge_size
        grid = 1, rows * merge, columns * merge
        return Media("image", np.zeros((math.prod(grid), self.patches.matrix.k), np.float32), grid, num_tokens, b"")

    def _media(self, patches: np.ndarray, grid: tuple[int, int, int]) -> Media:
        digest = digest_of(f"patches {grid} {patches.shape[1]} ", patches)
        num_tokens = math.prod(grid) // self.config.spatial_merge_size**2
        return Media("image", patches, grid, num_tokens, digest)
