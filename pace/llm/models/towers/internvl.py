"""The vision tower of InternVL: a transformer on tiles with a class row, and a projection of joined patches.

Source: `modeling_internvl.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.llm.layers import (
    Attention,
    Block,
    LayerNorm,
    LayerScale,
    Linear,
    NoHeadNorm,
    NoRotary,
    PlainMLP,
    TensorSource,
    Vectors,
    WholeNorm,
)
from pace.llm.models.towers.image_tower import ImageTower
from pace.llm.models.towers.internvl_config import HEAD_NORM_EPS, InternVLVisionConfig
from pace.llm.models.towers.parts import (
    PatchEmbedding,
    RowMLP,
    RowNorm,
    VisionBlock,
    cut_patches,
    join_patches,
    resized_table,
)
from pace.llm.models.towers.tower import RunSlice, rows_batch
from pace.media.media import Media, digest_of

PROJECTOR_EPS = 1e-5
"""Added to the variance in the projector's norm; not in the config."""


class InternVLTower(ImageTower):
    """Tiles are squares, most often of `image_size`. Media have their pixels, float32 `[T, C, S, S]`. In the blocks, a
    tile has one row more than patches, its first. The projector's tensors are under `vision_tower.projector` here."""

    prefix = "vision_tower."
    input_names = ("pixel_values",)

    def __init__(self, config: InternVLVisionConfig, width: int, placeholder: int):
        """`width`: the text's hidden_size."""
        self.config = config
        self.width = width
        self.placeholder = placeholder
        self.cache = config.cache
        size, name, learned = config.hidden_size, "vision_tower.embeddings", config.use_absolute_position_embeddings
        patches = f"{name}.patch_embeddings.projection"
        self.patches = PatchEmbedding(patches, size, config.patch_shape, bias=True, positions=learned)
        self.class_row = table_of_rows(f"{name}.cls_token", 1, size)
        num_positions = (1 + config.patches_per_side**2) * learned
        self.positions = table_of_rows(f"{name}.position_embeddings", num_positions, size)
        self.blocks = [
            VisionBlock(make_block(f"vision_tower.encoder.layer.{index}", config), size, config.cache, None)
            for index in range(config.num_hidden_layers)
        ]
        norm = LayerNorm("vision_tower.layernorm", size, config.layer_norm_eps)
        self.norm = None if config.use_mean_pooling else RowNorm(norm, size)
        name, joined = "vision_tower.projector", size * config.merge**2
        self.projector = RowMLP(
            LayerNorm(f"{name}.layer_norm", joined, PROJECTOR_EPS),
            {f"{name}.linear_1": width},
            {f"{name}.linear_2": width},
            joined,
            config.projector_act,
        )

    def patches_of(self, media: Media) -> Tensor:
        return cut_patches(torch.from_numpy(media.features), self.config.patch_size)

    def positions_of(self, media: Media) -> Tensor | None:
        tiles, rows, columns = media.grid
        if self.positions.values is None:
            return None
        side, table = self.config.patches_per_side, self.positions.values.view(-1, self.config.hidden_size)[1:]
        if (rows, columns) != (side, side):
            table = resized_table(table, side, rows, columns, cubic=True)
        return table.repeat(tiles, 1)

    def enter(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        first = self.class_row.values
        if self.positions.values is not None:
            first = first + self.positions.values[: len(first)]
        tiles = x.unflatten(0, (media.grid[0], -1))
        return torch.cat([first.expand(len(tiles), 1, -1), tiles], 1).flatten(0, 1)

    def lengths(self, media: Media) -> list[int]:
        return [1 + length for length in super().lengths(media)]

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        x = x.unflatten(0, (media.grid[0], -1))[:, 1:].flatten(0, 1)
        if self.norm is not None:
            x = run(self.norm, rows_batch(x), ())
        joined = join_patches(x, media.grid, self.config.merge)
        if self.config.transposed:
            tiles, rows, columns = media.grid
            joined = joined.view(tiles, rows // self.config.merge, columns // self.config.merge, -1).transpose(1, 2)
            joined = joined.flatten(0, 2)
        return run(self.projector, rows_batch(joined), ())

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        """Makes a medium of each tile: which of them are of one image, the array does not say."""
        config, (tiles,) = self.config, self.arrays_of(inputs)
        channels, size = config.num_channels, tiles.shape[-1] if tiles.ndim else 0
        per_side = size // config.patch_size
        is_square = tiles.ndim == 4 and tiles.shape[1:] == (channels, size, size)
        if not tiles.is_floating_point() or not is_square or not per_side or per_side % config.merge:
            raise ValueError(
                f"pixel_values must be floats [tiles, {channels}, S, S] with S // {config.patch_size} in multiples of "
                f"{config.merge}, such as S = {config.image_size}; got {tiles.dtype} {list(tiles.shape)}"
            )
        return [self._media(tile[None].contiguous()) for tile in tiles.detach().float().cpu()]

    def blank(self, num_tokens: int) -> Media:
        config = self.config
        per_side = config.patches_per_side // config.merge * config.merge
        of_tile = (per_side // config.merge) ** 2
        tiles, side = max(1, num_tokens // of_tile), per_side * config.patch_size
        features = np.zeros((tiles, config.num_channels, side, side), np.float32)
        return Media("image", features, (tiles, per_side, per_side), tiles * of_tile, b"")

    def _media(self, tile: Tensor) -> Media:
        features, per_side = tile.numpy(), tile.shape[-1] // self.config.patch_size
        digest = digest_of(f"tile {features.shape} ", features)
        num_tokens = (per_side // self.config.merge) ** 2
        return Media("image", features, (1, per_side, per_side), num_tokens, digest)


def make_block(name: str, config: InternVLVisionConfig) -> Block:
    """A block whose branches are scaled, channel by channel."""
    size, inner, attention = config.hidden_size, config.intermediate_size, f"{name}.attention"
    of_heads = [
        WholeNorm(f"{attention}.{part}_norm", size, HEAD_NORM_EPS) if config.use_qk_norm else NoHeadNorm()
        for part in "qk"
    ]
    apart = {f"{attention}.{part}_proj": size for part in "qkv"}
    return Block(
        config.norm(f"{name}.layernorm_before"),
        Attention(
            Linear({f"{attention}.qkv": 3 * size} if config.joined_qkv else apart, size, config.attention_bias),
            Linear({f"{attention}.projection_layer": size}, size, True),
            config.num_attention_heads,
            config.cache,
            NoRotary(),
            *of_heads,
        ),
        config.norm(f"{name}.layernorm_after"),
        PlainMLP.named(f"{name}.mlp.fc1", f"{name}.mlp.fc2", size, inner, config.hidden_act, bias=True),
        mixer_post_norm=LayerScale(f"{name}.lambda_1", size),
        mlp_post_norm=LayerScale(f"{name}.lambda_2", size),
    )


def table_of_rows(name: str, count: int, size: int) -> Vectors:
    """The tensor `name [1, count, size]`; nothing if it has no rows."""
    return Vectors({name: count * size}, {name: TensorSource((1, count, size))}) if count else Vectors({})
