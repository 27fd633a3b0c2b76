"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

An image is a grid of patches. The rows of `merge * merge` neighbouring patches follow each other, and become one row
for the text model. Source: `modeling_qwen3_vl.py`, `modeling_qwen2_5_vl.py` and `modeling_qwen2_vl.py` of
transformers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.llm.layers import (
    Attention,
    Block,
    GatedLinear,
    GatedMLP,
    Layer,
    LayerNorm,
    Linear,
    NoNorm,
    PlainMLP,
    RMSNorm,
    RopeConfig,
    Rotary,
    TensorSource,
    Vectors,
)
from pace.llm.layers.rotary import Angles
from pace.llm.models.towers.parts import PatchEmbedding, RowMLP, RowNorm, VisionBlock, interpolated
from pace.llm.models.towers.qwen_vision_config import (
    Qwen2_5VisionConfig,
    Qwen2VisionConfig,
    Qwen3VisionConfig,
    QwenVisionConfig,
)
from pace.llm.models.towers.tower import RunSlice, Tower, near_square, rows_batch, with_rows
from pace.llm.models.whole_spans import scratch
from pace.media.media import Media, digest_of

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""

EPS = 1e-6
"""Added to the variance in all norms; it is not in the config."""


class Merger(Layer):
    """Merges patches into rows for the text model. The norm is of each patch, or of all that are merged."""

    def __init__(self, patch_norm: RowNorm | None, mlp: RowMLP):
        self.patch_norm = patch_norm
        self.mlp = mlp

    def run(self, x: Tensor, run: RunSlice) -> Tensor:
        """Returns `[N / merge^2, out_hidden_size]` of `x [N, hidden_size]`."""
        if self.patch_norm is not None:
            x = run(self.patch_norm, rows_batch(x), ())
        return run(self.mlp, rows_batch(x.view(-1, self.mlp.size)), ())


class QwenVisionTower(Tower):
    """What the towers have in common: patches, blocks with an axial rotation, and a merger."""

    kind = "image"
    prefix = "visual."
    input_names = ("pixel_values", "image_grid_thw")
    num_groups: ClassVar[int] = 1
    """Groups of spans: frames, and windows if there are any."""

    def __init__(self, config: QwenVisionConfig, placeholder: int, adds_positions: bool):
        self.config = config
        self.placeholder = placeholder
        # The first half of a head's pairs turns with the row, the other with the column.
        self.rotary = Rotary(RopeConfig("default", config.rope_parameters, config.head_dim // 2, 2))
        name = "visual.patch_embed.proj"
        self.patches = PatchEmbedding(
            name, config.hidden_size, config.patch_shape, bias=adds_positions, positions=adds_positions
        )
        self.blocks = [
            VisionBlock(
                self.make_block(f"visual.blocks.{index}"),
                config.hidden_size,
                config.cache,
                config.head_dim // 2,
                self.group_of(index),
                self.num_groups,
            )
            for index in range(config.depth)
        ]
        self.merger = self.make_merger("visual.merger")

    @property
    def width(self) -> int:
        return self.config.out_hidden_size

    # -- parts that differ

    @abstractmethod
    def make_block(self, name: str) -> Block:
        """Makes a block."""

    @abstractmethod
    def make_merger(self, name: str) -> Merger:
        """Makes the merger of the last block's output."""

    def group_of(self, block: int) -> int:
        """The group of spans whose rows see each other in a block."""
        return 0

    def order(self, grid: Grid) -> tuple[Tensor | None, list[int]]:
        """The order of merged patches in the tower (None: as given), and the lengths of its windows in patches."""
        return None, []

    def positions_of(self, grid: Grid) -> Tensor | None:
        """float32 `[N, hidden_size]`, added to the patches; None for nothing."""
        return None

    def tap(self, block: int, x: Tensor, run: RunSlice) -> Tensor | None:
        """Returns `[N / merge^2, out_hidden_size]`, what the text model gets of a block's output `x`; None for
        nothing."""
        return None

    # -- a run

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        config = self.config
        frames, rows, columns = grid = media.grid
        order, windows = self.order(grid)
        patches = self._in_order(torch.from_numpy(media.features), order)
        positions = self.positions_of(grid)
        if positions is not None:
            patches = torch.cat([patches, positions], 1)
        x = run(self.patches, rows_batch(patches), ())
        yield
        groups = ([rows * columns] * frames, windows)[: self.num_groups]
        batch, angles = rows_batch(x, scratch(config.cache, *groups), *groups), self._angles(grid, order)
        taps = []
        for index, block in enumerate(self.blocks):
            x = run(block, with_rows(batch, x), angles)
            yield
            if (tapped := self.tap(index, x, run)) is not None:
                taps.append(tapped)
                yield
        merged = torch.cat([self.merger.run(x, run), *taps], 1)
        return merged if order is None else torch.empty_like(merged).index_copy_(0, order, merged)

    def _in_order(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Puts the merged patches of `x [N, W]` in the tower's order."""
        return x if order is None else x.unflatten(0, (len(order), -1))[order].flatten(0, 1)

    def _angles(self, grid: Grid, order: Tensor | None) -> Angles:
        """Cosines and sines `[N, head_dim / 2]` of the row and the column of each patch."""
        of_rows, of_columns = [self.rotary.angles(axis, axis) for axis in self.places(grid)]
        cos, sin = [self._in_order(torch.cat(pair, 1), order) for pair in zip(of_rows, of_columns)]
        return ((cos, sin),)

    def places(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """int64 `[N]` each: row and column of the patches, in the order in which they are given."""
        frames, rows, columns = grid
        merge = self.config.spatial_merge_size
        shape = rows // merge, merge, columns // merge, merge
        row = torch.arange(rows)[:, None].expand(rows, columns)
        column = torch.arange(columns).expand(rows, columns)
        return tuple(axis.reshape(shape).transpose(1, 2).flatten().repeat(frames) for axis in (row, column))

    # -- inputs

    def num_tokens(self, grid: Grid) -> int:
        """Rows for the text model."""
        return math.prod(grid) // self.config.spatial_merge_size**2

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        patches, grids = self.arrays_of(inputs)
        grids = grids.reshape(-1, 3).tolist()
        merge, k = self.config.spatial_merge_size, self.patches.matrix.k
        for index, (frames, rows, columns) in enumerate(grids):
            if frames != 1 or min(rows, columns) < merge or rows % merge or columns % merge:
                raise ValueError(
                    f"image_grid_thw of image {index} must be one frame, and rows and columns in multiples of {merge}; "
                    f"got {[frames, rows, columns]}"
                )
        total = sum(map(math.prod, grids))
        if not patches.is_floating_point() or patches.shape != (total, k):
            raise ValueError(
                f"pixel_values must be floats [{total}, {k}], the patches of image_grid_thw; got {patches.dtype} "
                f"{list(patches.shape)}"
            )
        pieces = patches.detach().float().cpu().split([math.prod(grid) for grid in grids])
        return [self._media(piece.contiguous().numpy(), tuple(grid)) for piece, grid in zip(pieces, grids)]

    def blank(self, num_tokens: int) -> Media:
        (rows, columns), merge = near_square(num_tokens), self.config.spatial_merge_size
        grid = 1, rows * merge, columns * merge
        features = np.zeros((math.prod(grid), self.patches.matrix.k), np.float32)
        return Media("image", features, grid, num_tokens, b"")

    def _media(self, patches: np.ndarray, grid: Grid) -> Media:
        digest = digest_of(f"patches {grid} {patches.shape[1]} ", patches)
        return Media("image", patches, grid, self.num_tokens(grid), digest)

    def angle_offsets(self, media: Media) -> tuple[np.ndarray, int]:
        frames, rows, columns = media.grid
        merge = self.config.spatial_merge_size
        grid = frames, rows // merge, columns // merge
        return np.indices(grid).reshape(3, -1), max(grid[1:])


class Qwen3VisionTower(QwenVisionTower):
    """Layer norms, biases everywhere, and a table of positions that is interpolated to the grid. The outputs of some
    blocks go to the text model as well (deepstack)."""

    def __init__(self, config: Qwen3VisionConfig, placeholder: int):
        super().__init__(config, placeholder, adds_positions=True)
        size = config.hidden_size
        table = "visual.pos_embed.weight"
        self.position_table = Vectors(
            {table: config.num_position_embeddings * size},
            {table: TensorSource((config.num_position_embeddings, size))},
        )
        self.deepstack = [
            self.make_merger(f"visual.deepstack_merger_list.{index}", norm_joined=True)
            for index in range(len(config.deepstack_visual_indexes))
        ]

    @property
    def width(self) -> int:
        return self.config.out_hidden_size * (1 + len(self.deepstack))

    def make_block(self, name: str) -> Block:
        return plain_block(name, "linear_fc1", "linear_fc2", self.config, self.rotary)

    def make_merger(self, name: str, norm_joined: bool = False) -> Merger:
        config = self.config
        norm = LayerNorm(f"{name}.norm", config.merged_size if norm_joined else config.hidden_size, EPS)
        names = f"{name}.linear_fc1", f"{name}.linear_fc2"
        if norm_joined:
            return Merger(None, merged_mlp(norm, *names, config))
        return Merger(RowNorm(norm, config.hidden_size), merged_mlp(NoNorm(), *names, config))

    def positions_of(self, grid: Grid) -> Tensor:
        side = math.isqrt(self.config.num_position_embeddings)
        table = self.position_table.values.view(side * side, -1)
        places = [axis.float() * (side - 1) / max(size - 1, 1) for axis, size in zip(self.places(grid), grid[1:])]
        return interpolated(table, side, *places)

    def tap(self, block: int, x: Tensor, run: RunSlice) -> Tensor | None:
        indexes = self.config.deepstack_visual_indexes
        return self.deepstack[indexes.index(block)].run(x, run) if block in indexes else None


class Qwen2VisionTower(QwenVisionTower):
    """Layer norms, and MLPs of two products."""

    def __init__(self, config: Qwen2VisionConfig, placeholder: int):
        super().__init__(config, placeholder, adds_positions=False)

    def make_block(self, name: str) -> Block:
        return plain_block(name, "fc1", "fc2", self.config, self.rotary)

    def make_merger(self, name: str) -> Merger:
        config = self.config
        norm = RowNorm(LayerNorm(f"{name}.ln_q", config.hidden_size, EPS), config.hidden_size)
        return Merger(norm, merged_mlp(NoNorm(), f"{name}.mlp.0", f"{name}.mlp.2", config))


class Qwen2_5VisionTower(QwenVisionTower):
    """RMS norms, gated MLPs, and windows in most blocks."""

    num_groups = 2

    def __init__(self, config: Qwen2_5VisionConfig, placeholder: int):
        super().__init__(config, placeholder, adds_positions=False)

    def make_block(self, name: str) -> Block:
        config = self.config
        size, inner = config.hidden_size, config.intermediate_size
        gate_up = {f"{name}.mlp.gate_proj": inner, f"{name}.mlp.up_proj": inner}
        mlp = GatedMLP(
            GatedLinear(gate_up, size, True), Linear({f"{name}.mlp.down_proj": size}, inner, True), config.hidden_act
        )
        return Block(
            RMSNorm(f"{name}.norm1", size, EPS),
            make_attention(f"{name}.attn", config, self.rotary),
            RMSNorm(f"{name}.norm2", size, EPS),
            mlp,
        )

    def make_merger(self, name: str) -> Merger:
        config = self.config
        norm = RowNorm(RMSNorm(f"{name}.ln_q", config.hidden_size, EPS), config.hidden_size)
        return Merger(norm, merged_mlp(NoNorm(), f"{name}.mlp.0", f"{name}.mlp.2", config))

    def group_of(self, block: int) -> int:
        return 0 if block in self.config.fullatt_block_indexes else 1

    def order(self, grid: Grid) -> tuple[Tensor, list[int]]:
        config = self.config
        merge = config.spatial_merge_size
        side = config.window_size // merge // config.patch_size
        frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
        index = torch.arange(frames * rows * columns).view(frames, rows, columns)
        windows = [
            frame[row : row + side, column : column + side].flatten()
            for frame in index
            for row in range(0, rows, side)
            for column in range(0, columns, side)
        ]
        return torch.cat(windows), [len(window) * merge**2 for window in windows]


def merged_mlp(norm: LayerNorm | NoNorm, first: str, second: str, config: QwenVisionConfig) -> RowMLP:
    """Rows for the text model of merged patches."""
    size = config.merged_size
    return RowMLP(norm, {first: size}, {second: config.out_hidden_size}, size, "gelu")


def plain_block(name: str, first: str, second: str, config: QwenVisionConfig, rotary: Rotary) -> Block:
    """A block with layer norms, whose MLP has the products `first` and `second`."""
    size, inner = config.hidden_size, config.intermediate_size
    mlp = PlainMLP.named(f"{name}.mlp.{first}", f"{name}.mlp.{second}", size, inner, config.hidden_act, bias=True)
    return Block(
        LayerNorm(f"{name}.norm1", size, EPS),
        make_attention(f"{name}.attn", config, rotary),
        LayerNorm(f"{name}.norm2", size, EPS),
        mlp,
    )


def make_attention(name: str, config: QwenVisionConfig, rotary: Rotary) -> Attention:
    size = config.hidden_size
    parts = {f"{name}.{part}": size for part in "qkv"} if config.splits_qkv else {f"{name}.qkv": 3 * size}
    return Attention(
        Linear(parts, size, True),
        Linear({f"{name}.proj": size}, size, True),
        config.num_heads,
        config.cache,
        rotary,
    )
