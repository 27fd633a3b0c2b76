"""The vision towers of LLaVA: CLIP, or SigLIP.

CLIP has one row more than patches, and a norm before the first block. LLaVA takes the rows of a block before the last
one. Source: `modeling_clip.py`, `modeling_siglip.py` and `modeling_llava.py` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.llm.layers import LayerNorm, Vectors
from pace.llm.models.model_config import activation, number
from pace.llm.models.towers.parts import PatchEmbedding, RowNorm, VisionBlock
from pace.llm.models.towers.projector import ProjectorConfig
from pace.llm.models.towers.siglip import SiglipVisionConfig, SquareTower, position_table, side, siglip_block
from pace.llm.models.towers.tower import RunSlice, rows_batch
from pace.media.media import Media

BLOCKS = "vision_tower.encoder.layers"
EMBEDDINGS = "vision_tower.embeddings"


@dataclass(frozen=True, kw_only=True)
class ClipVisionConfig(SiglipVisionConfig):
    model_types: ClassVar[tuple[str, ...]] = ("clip_vision_model",)
    without_effect: ClassVar[frozenset[str]] = SiglipVisionConfig.without_effect | {"initializer_factor", "vocab_size"}

    patch_size: int = side(32, 512)
    hidden_act: str = activation("quick_gelu")
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)


class LlavaTower(SquareTower):
    """SigLIP in LLaVA: the rows of a block, and two products."""

    num_first: ClassVar[int] = 0
    """Rows before those of patches."""

    def __init__(self, config: SiglipVisionConfig, projector: ProjectorConfig, placeholder: int):
        self.config = config
        self.projector = projector
        self.placeholder = placeholder
        self.cache = config.cache
        size = config.hidden_size
        self.feature_layers = projector.layers(config.num_hidden_layers)
        self.patches = PatchEmbedding(
            f"{EMBEDDINGS}.patch_embedding", size, config.patch_shape, bias=not self.num_first, positions=True
        )
        num_positions = config.patches_per_side**2 + self.num_first
        self.positions = position_table(f"{EMBEDDINGS}.position_embedding.weight", num_positions, size)
        self.blocks = [
            VisionBlock(siglip_block(f"{BLOCKS}.{index}", config), size, config.cache, None)
            for index in range(max(self.feature_layers))
        ]
        self.mlp = projector.make_mlp(size * len(self.feature_layers))
        self.unused = (
            *projector.unused(BLOCKS, config.num_hidden_layers),
            r"vision_tower\.(post_layernorm|head)\..*",
            r"vision_tower\.embeddings\.position_ids",
        )

    @property
    def width(self) -> int:
        return self.projector.out_hidden_size

    def num_tokens(self) -> int:
        return num_llava_tokens(self.config, self.projector)

    def positions_of(self, media: Media) -> Tensor:
        return self.positions.values.view(-1, self.config.hidden_size)[self.num_first :].repeat(media.grid[0], 1)

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        tiles = x.unflatten(0, (media.grid[0], -1))
        return run(self.mlp, rows_batch(tiles[:, tiles.shape[1] - self.num_tokens() :].flatten(0, 1)), ())


class LlavaClipTower(LlavaTower):
    """CLIP in LLaVA. Its first row is made of no pixels, and is left out or not."""

    num_first = 1

    def __init__(self, config: ClipVisionConfig, projector: ProjectorConfig, placeholder: int):
        super().__init__(config, projector, placeholder)
        size = config.hidden_size
        self.first = Vectors({f"{EMBEDDINGS}.class_embedding": size})
        self.norm = RowNorm(LayerNorm("vision_tower.pre_layrnorm", size, config.layer_norm_eps), size)

    def lengths(self, media: Media) -> list[int]:
        return [rows + self.num_first for rows in super().lengths(media)]

    def enter(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        first = self.first.values + self.positions.values[: self.config.hidden_size]
        tiles = x.unflatten(0, (media.grid[0], -1))
        x = torch.cat([first.expand(len(tiles), 1, -1), tiles], 1).flatten(0, 1)
        return run(self.norm, rows_batch(x), ())


def num_llava_tokens(config: SiglipVisionConfig, projector: ProjectorConfig) -> int:
    """Rows for the text model of each image."""
    num_rows = config.patches_per_side**2 + (1 if isinstance(config, ClipVisionConfig) else 0)
    return num_rows - (projector.vision_feature_select_strategy == "default")
