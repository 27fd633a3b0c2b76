"""The audio towers of Qwen3-Omni and Qwen3-ASR.

A chunk of 100 frames of a spectrogram becomes 13 rows by three convolutions. A transformer encoder follows, whose rows
see each other in windows of a few chunks. Source: `modeling_qwen3_omni_moe.py` and `modeling_qwen3_asr.py` of
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pace.batch import ForwardBatch, Positions
from pace.llm.layers import Attention, Block, FloatLinear, LayerNorm, Linear, NoRotary, PlainMLP, TensorSource
from pace.llm.layers.rotary import Angles
from pace.llm.layers.weight_target import Piece
from pace.llm.models.model_config import MAX_LAYERS, activation, checked_head_dim, count, declared
from pace.llm.models.towers.tower import RunSlice, Slice, Tower, rows_batch, with_rows
from pace.llm.models.towers.vision_config import TowerConfig
from pace.llm.models.whole_spans import scratch
from pace.llm.processors.qwen_audio import CHUNK, CHUNK_TOKENS, num_tokens
from pace.media.media import Media, digest_of
from pace.naming import shown
from pace.ops.protocol import ForwardOps

EPS = 1e-5
"""Added to the variance in all norms; it is not in the config."""
TOGETHER = 4
"""Chunks that one slice convolves. Their inputs of the second convolution take 55 MB in the largest tower."""


def half_chunk() -> Any:
    def read(value: Any) -> int:
        if type(value) is not int or value != CHUNK // 2:
            raise NotImplementedError(f"{shown(value)} is not implemented; implemented: {CHUNK // 2}")
        return value

    return declared(CHUNK // 2, read)


@dataclass(frozen=True, kw_only=True)
class QwenAudioConfig(TowerConfig):
    """Fields of `audio_config` in config.json; the defaults are those of Qwen3-Omni."""

    section: ClassVar[str] = "audio_config"

    num_mel_bins: int = count(128, 512)
    encoder_layers: int = count(32, MAX_LAYERS)
    encoder_attention_heads: int = count(20)
    encoder_ffn_dim: int = count(5120)
    d_model: int = count(1280, minimum=4)
    activation_function: str = activation("gelu")
    n_window: int = half_chunk()
    """Half of the frames of a chunk."""
    n_window_infer: int = count(800)
    """Frames whose rows see each other."""
    downsample_hidden_size: int = count(480)
    """Channels of the convolutions."""
    output_dim: int = count(3584)

    def check(self) -> None:
        size, heads = self.d_model, self.encoder_attention_heads
        if size % heads or size % 2:
            raise ValueError(
                f"config.json: audio_config.d_model must be even, and a multiple of encoder_attention_heads; got "
                f"{size} and {heads} heads"
            )
        checked_head_dim(self.head_dim)
        if self.n_window_infer % CHUNK:
            raise ValueError(
                f"config.json: audio_config.n_window_infer must be a multiple of {CHUNK}, the frames of a chunk; got "
                f"{self.n_window_infer}"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.encoder_attention_heads

    @property
    def cache(self) -> Positions:
        return Positions(self.encoder_attention_heads, self.head_dim, self.head_dim)

    @property
    def convolved_size(self) -> int:
        """Floats that the convolutions make of a piece of time: all channels of an eighth of the bands."""
        return self.downsample_hidden_size * math.ceil(self.num_mel_bins / 8)

    @property
    def window_rows(self) -> int:
        """Rows of a window."""
        return self.n_window_infer // CHUNK * CHUNK_TOKENS


@dataclass(frozen=True, kw_only=True)
class Qwen3ASRAudioConfig(QwenAudioConfig):
    encoder_layers: int = count(24, MAX_LAYERS)
    encoder_attention_heads: int = count(16)
    encoder_ffn_dim: int = count(4096)
    d_model: int = count(1024, minimum=4)


class ConvolutionMatrix(FloatLinear):
    """The matrix of a convolution of 3 x 3. The 9 places of a channel are adjacent in the checkpoint; here, the
    channels of a place are."""

    def __init__(self, name: str, outputs: int, inputs: int, bias: bool = True):
        super().__init__({name: TensorSource((outputs, inputs, 3, 3), joined=True)}, 9 * inputs, bias)

    def _fill(self, source: Piece, part: str, row: int) -> None:
        super()._fill(source.unflatten(1, (-1, 9)).transpose(1, 2).flatten(1), part, row)


class Convolution(Slice):
    """A convolution of 3 x 3 with a step of 2 and `gelu`, as a product of the 9 inputs of each output."""

    def __init__(self, name: str, outputs: int, inputs: int):
        self.matrix = ConvolutionMatrix(name, outputs, inputs)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.matrix(ops, ops.given_rows(batch.given.rows[:, : self.matrix.k]), "gelu")

    def run(self, x: Tensor, run: RunSlice) -> Tensor:
        """Returns `[N, ceil(F / 2), ceil(T / 2), outputs]` of `x [N, F, T, inputs]`."""
        shape = x.shape[0], -(-x.shape[1] // 2), -(-x.shape[2] // 2)
        padded = functional.pad(x, (0, 0, 1, x.shape[2] % 2, 1, x.shape[1] % 2))
        places = padded.unfold(1, 3, 2).unfold(2, 3, 2).permute(0, 1, 2, 4, 5, 3)
        return run(self, rows_batch(places.reshape(-1, self.matrix.k)), ()).view(*shape, -1)


class RowEmbedding(Slice):
    """Rows of the encoder: a product of what the convolutions made of a piece of time, and its position. Given rows
    are both, one after the other."""

    def __init__(self, name: str, config: QwenAudioConfig):
        self.matrix = FloatLinear({name: config.d_model}, config.convolved_size)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        rows, k = batch.given.rows, self.matrix.k
        positions = ops.given_rows(rows[:, k : k + self.matrix.n])
        return self.matrix(ops, ops.given_rows(rows[:, :k]), residual=positions)


class AudioBlock(Slice):
    """A block whose rows see the others of their window."""

    def __init__(self, name: str, config: QwenAudioConfig):
        size, inner = config.d_model, config.encoder_ffn_dim
        attention = Attention(
            Linear({f"{name}.self_attn.{part}_proj": size for part in "qkv"}, size, True),
            Linear({f"{name}.self_attn.out_proj": size}, size, True),
            config.encoder_attention_heads,
            config.cache,
            NoRotary(),
        )
        first, second = Linear({f"{name}.fc1": inner}, size, True), Linear({f"{name}.fc2": size}, inner, True)
        mlp = PlainMLP(first, second, config.activation_function)
        norms = [LayerNorm(f"{name}.{norm}_layer_norm", size, EPS) for norm in ("self_attn", "final")]
        self.block = Block(norms[0], attention, norms[1], mlp)
        self.size = size
        self.caches = (config.cache,)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.block(ops, ops.given_rows(batch.given.rows[:, : self.size]), angles, batch, batch.kv[0])


class Projector(Slice):
    """Rows for the text model: `second(act(first(norm(x))))`."""

    def __init__(self, norm: str, first: str, second: str, config: QwenAudioConfig):
        self.size = size = config.d_model
        self.norm = LayerNorm(norm, size, EPS)
        self.mlp = PlainMLP(
            FloatLinear({first: size}, size, True),
            FloatLinear({second: config.output_dim}, size, True),
            config.activation_function,
        )

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.mlp(ops, self.norm(ops, ops.given_rows(batch.given.rows[:, : self.size])))


class QwenAudioTower(Tower):
    """The tower of Qwen3-Omni. A clip below a second is one chunk of its own length."""

    kind = "audio"
    rows_a_second = CHUNK_TOKENS
    prefix = "audio_tower."
    input_names = ("input_features", "feature_attention_mask")
    projector_names: ClassVar[tuple[str, str]] = ("audio_tower.proj1", "audio_tower.proj2")
    """Names of the two last matrices."""
    pads_short: ClassVar[bool] = False
    """True if a clip below a second is filled with zeros up to a whole chunk."""

    def __init__(self, config: QwenAudioConfig, placeholder: int):
        self.config = config
        self.placeholder = placeholder
        channels = config.downsample_hidden_size
        self.convolutions = [
            Convolution(f"audio_tower.conv2d{number}", channels, inputs)
            for number, inputs in ((1, 1), (2, channels), (3, channels))
        ]
        self.embedding = RowEmbedding("audio_tower.conv_out", config)
        self.blocks = [AudioBlock(f"audio_tower.layers.{index}", config) for index in range(config.encoder_layers)]
        self.projector = Projector("audio_tower.ln_post", *self.projector_names, config)

    @property
    def width(self) -> int:
        return self.config.output_dim

    # -- a run

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        pieces = []
        for chunks in self._chunks(media).split(TOGETHER):
            for convolution in self.convolutions:
                chunks = convolution.run(chunks, run)
                yield
            pieces.append(chunks.permute(0, 2, 3, 1).flatten(2))
        convolved = torch.cat(pieces)
        positions = sinusoids(convolved.shape[1], self.config.d_model).expand(len(convolved), -1, -1)
        # Only the last chunk has rows without sound, at its end.
        rows = torch.cat([convolved, positions], 2).flatten(0, 1)[: media.num_tokens]
        x = run(self.embedding, rows_batch(rows), ())
        yield
        whole, rest = divmod(len(x), self.config.window_rows)
        windows = [self.config.window_rows] * whole + [rest] * (rest > 0)
        batch = rows_batch(x, scratch(self.config.cache, windows), windows)
        for block in self.blocks:
            x = run(block, with_rows(batch, x), ())
            yield
        return run(self.projector, rows_batch(x), ())

    def _chunks(self, media: Media) -> Tensor:
        """Returns `[N, mels, T, 1]`, zeros after the end."""
        features = torch.from_numpy(media.features)
        frames = features.shape[1]
        width = CHUNK if self.pads_short else min(CHUNK, frames)
        padded = functional.pad(features, (0, -frames % width))
        return padded.unflatten(1, (-1, width)).transpose(0, 1)[..., None]

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        features, mask = self.arrays_of(inputs)
        mels = self.config.num_mel_bins
        if not features.is_floating_point() or features.ndim != 3 or features.shape[1] != mels:
            raise ValueError(
                f"input_features must be floats [clips, {mels}, frames]; got {features.dtype} {list(features.shape)}"
            )
        if mask.shape != features[:, 0].shape:
            raise ValueError(
                f"{self.input_names[1]} must be [clips, frames] of input_features, {list(features[:, 0].shape)}; "
                f"got {list(mask.shape)}"
            )
        return [self._media(*pair, index) for index, pair in enumerate(zip(features, mask.bool(), strict=True))]

    def blank(self, num_tokens: int) -> Media:
        chunks = max(1, num_tokens // CHUNK_TOKENS)
        features = np.zeros((self.config.num_mel_bins, chunks * CHUNK), np.float32)
        return Media("audio", features, None, chunks * CHUNK_TOKENS, b"")

    def _media(self, features: Tensor, mask: Tensor, index: int) -> Media:
        frames = int(mask.sum())
        if not frames or not mask[:frames].all():
            raise ValueError(f"{self.input_names[1]} of clip {index} must be ones, and then zeros")
        found = features[:, :frames].detach().float().cpu().contiguous().numpy()
        digest = digest_of(f"frames {found.shape} ", found)
        return Media("audio", found, None, num_tokens(frames), digest)


class Qwen3ASRAudioTower(QwenAudioTower):
    """The same tower with whole chunks. The projector's tensors, `model.multi_modal_projector` in the checkpoint, are
    under `audio_tower.projector` here."""

    input_names = ("input_features", "input_features_mask")
    projector_names = ("audio_tower.projector.linear_1", "audio_tower.projector.linear_2")
    pads_short = True


def sinusoids(length: int, size: int) -> Tensor:
    """Returns float32 `[length, size]`: sines of `size / 2` frequencies from 1 to 1 / 10000, then their cosines."""
    half = size // 2
    frequencies = torch.exp(-math.log(10000) / (half - 1) * torch.arange(half).float())
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
