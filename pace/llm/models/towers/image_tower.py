"""Base class of towers whose blocks all see a whole tile: patches, blocks, and a projection."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pace.batch import Positions
from pace.llm.layers.rotary import Angles
from pace.llm.models.towers.parts import PatchEmbedding, VisionBlock
from pace.llm.models.towers.tower import RunSlice, Tower, rows_batch, with_rows
from pace.llm.models.whole_spans import scratch
from pace.media.media import Media

Grid = tuple[int, int, int]
"""Tiles, and rows and columns of patches in each."""

TOGETHER = 1024
"""Rows of patches that one slice computes, if tiles are so small. More would make the next tokens of others wait."""


class ImageTower(Tower):
    """An image is a grid of tiles of the same size, and a tile is a grid of patches, row by row. Rows of different
    tiles do not see each other."""

    kind = "image"
    patches: PatchEmbedding
    blocks: Sequence[VisionBlock]
    cache: Positions
    """What a block keeps of each row."""
    feature_layers: tuple[int, ...] = (-1,)
    """What `project` gets, side by side: 0 is the input of the first block, n the output of block n, -1 of the last."""

    @abstractmethod
    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        """Returns `[media.num_tokens, width]` of the `feature_layers`' rows `x`, one row for each row of `enter`."""

    def patches_of(self, media: Media) -> Tensor:
        """float32 `[N, K]`: the patches of each tile, row by row."""
        return torch.from_numpy(media.features)

    def positions_of(self, media: Media) -> Tensor | None:
        """float32 `[N, hidden_size]`, added to the patches; None for nothing."""
        return None

    def enter(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        """The input of the first block, from the embedded patches `x [N, hidden_size]`. A tower adds here what is not
        made of pixels."""
        return x

    def lengths(self, media: Media) -> list[int]:
        """Rows of each tile in `enter`'s result."""
        tiles, rows, columns = media.grid
        return [rows * columns] * tiles

    def angles_of(self, media: Media) -> Angles:
        """The angles of each row, for blocks with a rotation."""
        return ()

    def pieces(self, media: Media) -> Iterator[Media]:
        """Yields the image in parts of a few tiles. Their `features` are a part of the image's along the first axis."""
        tiles, rows, columns = media.grid
        count = max(1, TOGETHER // (rows * columns))
        features, num_tokens = len(media.features) // tiles, media.num_tokens // tiles
        for first in range(0, tiles, count):
            last = min(first + count, tiles)
            yield replace(
                media,
                features=media.features[first * features : last * features],
                grid=(last - first, rows, columns),
                num_tokens=(last - first) * num_tokens,
                runs=(),
            )

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        rows: list[Tensor] = []
        for piece in self.pieces(media):
            if rows:
                yield
            rows.append((yield from self._encode(piece, run)))
        return torch.cat(rows)

    def _encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        patches, positions = self.patches_of(media), self.positions_of(media)
        if positions is not None:
            patches = torch.cat([patches, positions], 1)
        x = self.enter(run(self.patches, rows_batch(patches), ()), media, run)
        yield
        lengths = self.lengths(media)
        batch, angles = rows_batch(x, scratch(self.cache, lengths), lengths), self.angles_of(media)
        taken = {0: x} if 0 in self.feature_layers else {}
        for number, block in enumerate(self.blocks, 1):
            x = run(block, with_rows(batch, x), angles)
            yield
            if number in self.feature_layers:
                taken[number] = x
        taken[-1] = x
        return self.project(torch.cat([taken[number] for number in self.feature_layers], 1), media, run)
