"""The images and the sound of Gemma 4 12B, which has no encoders. A patch of 48 x 48 pixels becomes a row by two
products, and 40 ms of sound by one.

Source: `modeling_gemma4_unified.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers import FloatLinear, LayerNorm, TensorSource, UnitNorm, Vectors
from pace.llm.layers.rotary import Angles
from pace.llm.models.model_config import count, number
from pace.llm.models.towers.gemma4_audio import read_clips
from pace.llm.models.towers.gemma4_vision import CHANNELS, INPUT_NAMES, blank_image, places, read_grids
from pace.llm.models.towers.parts import RowLinear
from pace.llm.models.towers.tower import RunSlice, Slice, Tower, rows_batch
from pace.llm.models.towers.vision_config import MAX_SIZE, VisionConfig
from pace.media.media import Media, digest_of
from pace.ops.protocol import ForwardOps

EPS = 1e-5
"""Added to the variance in the layer norms; it is not in the config."""


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedVisionConfig(VisionConfig):
    """Fields of `vision_config` in config.json."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma4_unified_vision",)
    without_effect: ClassVar[frozenset[str]] = frozenset({"default_output_length", "model_patch_size"})

    patch_size: int = count(16, 512)
    pooling_kernel_size: int = count(3, 64)
    """The side of a patch is a multiple of `patch_size` by this."""
    mm_embed_dim: int = count(3840, MAX_SIZE)
    mm_posemb_size: int = count(1120, MAX_SIZE)
    """Number of positions of each axis."""
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    output_proj_dims: int = count(3840, MAX_SIZE)

    def check(self) -> None:
        if self.output_proj_dims != self.mm_embed_dim:
            raise ValueError(
                "config.json: vision_config.output_proj_dims must be mm_embed_dim; got "
                f"{self.output_proj_dims} and {self.mm_embed_dim}"
            )

    @property
    def patch_elements(self) -> int:
        return CHANNELS * (self.patch_size * self.pooling_kernel_size) ** 2


class PatchRows(Slice):
    """Rows for the text model of patches and of their positions. Given rows are both, one after the other."""

    def __init__(self, config: Gemma4UnifiedVisionConfig, width: int):
        name, size, k = "embed_vision", config.mm_embed_dim, config.patch_elements
        self.patch_norm = LayerNorm(f"{name}.patch_ln1", k, EPS)
        self.embedding = FloatLinear({f"{name}.patch_dense": size}, k, True)
        self.embedding_norm = LayerNorm(f"{name}.patch_ln2", size, EPS)
        self.position_norm = LayerNorm(f"{name}.pos_norm", size, EPS)
        self.norm = UnitNorm(size, config.rms_norm_eps)
        self.projection = FloatLinear({f"{name}.multimodal_embedder.embedding_projection": width}, size)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        rows, k, size = batch.given.rows, self.embedding.k, self.embedding.n
        x = self.embedding(ops, self.patch_norm(ops, ops.given_rows(rows[:, :k])))
        x = self.embedding_norm(ops, x) + ops.given_rows(rows[:, k : k + size])
        return self.projection(ops, self.norm(ops, self.position_norm(ops, x)))


class Gemma4UnifiedTower(Tower):
    """Every patch is a row of its own, with learned positions of its column and its row."""

    kind = "image"
    prefix = "embed_vision."
    input_names = INPUT_NAMES

    def __init__(self, config: Gemma4UnifiedVisionConfig, width: int, placeholder: int):
        """`width`: the text's hidden_size."""
        self.config = config
        self.width = width
        self.placeholder = placeholder
        shape = config.mm_posemb_size, 2, config.mm_embed_dim
        table = f"{self.prefix}pos_embedding"
        self.positions = Vectors({table: 2 * shape[0] * shape[2]}, {table: TensorSource(shape)})
        self.rows = PatchRows(config, width)

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        table = self.positions.values.view(-1, 2, self.config.mm_embed_dim)
        columns, rows = places(media)
        positions = table[columns, 0] + table[rows, 1]
        patches = torch.cat([torch.from_numpy(media.features), positions], 1)
        yield from ()
        return run(self.rows, rows_batch(patches), ())

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        config = self.config
        return read_grids(inputs, config.patch_elements, 1, config.mm_posemb_size)

    def blank(self, num_tokens: int) -> Media:
        return blank_image(num_tokens, self.config.patch_elements, 1)


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedAudioConfig(VisionConfig):
    """Fields of `audio_config` in config.json."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma4_unified_audio",)
    section: ClassVar[str] = "audio_config"
    without_effect: ClassVar[frozenset[str]] = frozenset({"audio_samples_per_token", "hidden_size", "output_proj_dims"})

    audio_embed_dim: int = count(640, MAX_SIZE)
    """Samples of a row."""
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)


class Gemma4UnifiedAudioTower(Tower):
    """Every frame of samples is a row of its own."""

    kind = "audio"
    rows_a_second = 25
    prefix = "embed_audio."
    input_names = ("input_features", "input_features_mask")

    def __init__(self, config: Gemma4UnifiedAudioConfig, width: int, placeholder: int):
        """`width`: the text's hidden_size."""
        self.config = config
        self.width = width
        self.placeholder = placeholder
        size = config.audio_embed_dim
        norm = UnitNorm(size, config.rms_norm_eps)
        self.rows = RowLinear(norm, {f"{self.prefix}embedding_projection": width}, size, bias=False)

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        yield from ()
        return run(self.rows, rows_batch(torch.from_numpy(media.features)), ())

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        clips = read_clips(*self.arrays_of(inputs), self.config.audio_embed_dim)
        return [self._media(*clip, index) for index, clip in enumerate(clips)]

    def blank(self, num_tokens: int) -> Media:
        features = np.zeros((num_tokens, self.config.audio_embed_dim), np.float32)
        return Media("audio", features, None, num_tokens, b"")

    def _media(self, features: Tensor, mask: Tensor, index: int) -> Media:
        if not mask.any():
            raise ValueError(f"{self.input_names[1]} of clip {index} has no ones")
        found = features[mask].detach().float().cpu().contiguous().numpy()
        digest = digest_of(f"frames {found.shape} ", found)
        return Media("audio", found, None, len(found), digest)
