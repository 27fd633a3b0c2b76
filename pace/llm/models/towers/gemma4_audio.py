"""The audio tower of Gemma 4 E2B and E4B: a conformer.

Two convolutions make a row of four frames of a spectrogram. In every layer, rows see a few rows before them, and a
convolution over time follows. Source: `modeling_gemma4.py` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pace.batch import ForwardBatch
from pace.llm.layers import Layer, LayerNorm, Linear, NoNorm, RMSNorm, TensorSource, UnitNorm, Vectors
from pace.llm.layers.rotary import Angles
from pace.llm.models.model_config import MAX_LAYERS, activation, checked_head_dim, count, declared, flag, number
from pace.llm.models.towers.gemma4_vision import ClippedHeads, ClippedLinear
from pace.llm.models.towers.parts import RowLinear
from pace.llm.models.towers.qwen_audio import Convolution, ConvolutionMatrix
from pace.llm.models.towers.tower import RunSlice, Slice, Tower, rows_batch
from pace.llm.models.towers.vision_config import MAX_SIZE, VisionConfig
from pace.media.media import Media, digest_of
from pace.ops.experts import Clamp
from pace.ops.protocol import ForwardOps

EPS = 1e-6
"""Added to the mean square in most norms; it is not in the config."""
FRAMES = 4
"""Frames of a row."""


def two_channels() -> Any:
    def read(value: Any) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != 2 or any(type(one) is not int or one < 1 for one in value):
            raise ValueError("a list of two numbers of channels")
        return tuple(value)

    return declared((128, 32), read)


@dataclass(frozen=True, kw_only=True)
class Gemma4AudioConfig(VisionConfig):
    """Fields of `audio_config` in config.json."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma4_audio",)
    section: ClassVar[str] = "audio_config"

    hidden_size: int = count(1024, MAX_SIZE, minimum=4)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(8)
    hidden_act: str = activation("silu")
    subsampling_conv_channels: tuple[int, int] = two_channels()
    conv_kernel_size: int = count(5, 64)
    residual_weight: float = number(0.5, -1e6, 1e6)
    attention_chunk_size: int = count(12, 4096)
    attention_context_left: int = count(13, 4096)
    attention_context_right: int = count(0, 4096, minimum=0)
    attention_logit_cap: float = number(50.0, 1e-6, 1e9)
    attention_invalid_logits_value: float = number(-1e9, -1e30, 0.0)
    use_clipped_linears: bool = flag(True)
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    gradient_clipping: float = number(1e10, 1e-6, 1e30)
    output_proj_dims: int = count(1536, MAX_SIZE)

    def check(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.hidden_size % 2:
            raise ValueError(
                "config.json: audio_config.hidden_size must be even, and a multiple of num_attention_heads; got "
                f"{self.hidden_size} and {self.num_attention_heads} heads"
            )
        checked_head_dim(self.head_dim)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_bands(self) -> int:
        """Bands of a spectrogram: as in transformers, the channels of the first convolution."""
        return self.subsampling_conv_channels[0] // 4 * 4

    @property
    def context(self) -> int:
        """Rows that a chunk of rows may see."""
        return self.attention_chunk_size + self.attention_context_left - 1 + self.attention_context_right

    def product(self, name: str, n: int, k: int) -> ClippedLinear | Linear:
        return ClippedLinear(name, n, k) if self.use_clipped_linears else Linear({f"{name}.linear": n}, k)


class Subsampling(Convolution):
    """A convolution of 3 x 3 with a step of 2, a layer norm of the channels, and `relu`."""

    def __init__(self, name: str, outputs: int, inputs: int, eps: float):
        self.matrix = ConvolutionMatrix(f"{name}.conv", outputs, inputs, bias=False)
        self.norm = LayerNorm(f"{name}.norm", outputs, eps, bias=False)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        rows = self.matrix(ops, ops.given_rows(batch.given.rows[:, : self.matrix.k]))
        return ops.activation(self.norm(ops, rows), "relu")


class AudioPart(Slice):
    """A part of a layer. Given rows are its input `[T, hidden]` and, for some parts, the residual after it."""

    def __init__(self, config: Gemma4AudioConfig):
        self.config = config
        self.size = config.hidden_size
        self.clamp = Clamp(-config.gradient_clipping, config.gradient_clipping)

    def given(self, ops: ForwardOps, batch: ForwardBatch, part: int = 0) -> Tensor:
        return ops.given_rows(batch.given.rows[:, part * self.size : (part + 1) * self.size])

    def clamped(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return ops.activation(x, self.clamp)


class AudioFeedForward(AudioPart):
    """`x + scale * post_norm(second(act(first(norm(x)))))`."""

    def __init__(self, name: str, config: Gemma4AudioConfig):
        super().__init__(config)
        inner = 4 * self.size
        self.norm = RMSNorm(f"{name}.pre_layer_norm", self.size, EPS)
        self.first = config.product(f"{name}.ffw_layer_1", inner, self.size)
        self.second = config.product(f"{name}.ffw_layer_2", self.size, inner)
        self.post_norm = RMSNorm(f"{name}.post_layer_norm", self.size, EPS)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        x = self.given(ops, batch)
        y = self.first(ops, self.norm(ops, self.clamped(ops, x)))
        y = self.second(ops, ops.activation(y, self.config.hidden_act))
        y = self.post_norm(ops, self.clamped(ops, y))
        ops.scale_(y, self.config.residual_weight)
        return x + y


class AudioHeads(AudioPart):
    """Queries, keys and values `[T, 3 * hidden]` of the normalised rows."""

    def __init__(self, name: str, config: Gemma4AudioConfig):
        super().__init__(config)
        self.norm = RMSNorm(f"{name}.norm_pre_attn", self.size, EPS)
        self.width = 3 * self.size
        names = {f"{name}.self_attn.{part}_proj.linear": self.size for part in "qkv"}
        rows = [self.size] * 3
        self.qkv = (
            ClippedHeads(f"{name}.self_attn", rows, self.size)
            if config.use_clipped_linears
            else Linear(names, self.size)
        )

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.qkv(ops, self.norm(ops, self.clamped(ops, self.given(ops, batch))))


class AudioOutput(AudioPart):
    """`residual + norm(product(context))`."""

    def __init__(self, name: str, config: Gemma4AudioConfig):
        super().__init__(config)
        self.product = config.product(f"{name}.self_attn.post", self.size, self.size)
        self.norm = RMSNorm(f"{name}.norm_post_attn", self.size, EPS)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        y = self.clamped(ops, self.product(ops, self.given(ops, batch)))
        return self.given(ops, batch, 1) + self.norm(ops, y)


class ConvolutionStart(AudioPart):
    """Rows before the convolution over time: `a * sigmoid(b)` of a product [a | b]."""

    def __init__(self, name: str, config: Gemma4AudioConfig):
        super().__init__(config)
        self.norm = RMSNorm(f"{name}.pre_layer_norm", self.size, config.rms_norm_eps)
        self.product = config.product(f"{name}.linear_start", 2 * self.size, self.size)
        self.width = self.size

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        both = self.product(ops, self.norm(ops, self.given(ops, batch)))
        x = both[:, : self.size].clone()
        ops.gate_(x, both[:, self.size :], "sigmoid")
        return x


class ConvolutionEnd(AudioPart):
    """`residual + product(act(norm(x)))` of convolved rows."""

    def __init__(self, name: str, config: Gemma4AudioConfig):
        super().__init__(config)
        self.norm = RMSNorm(f"{name}.conv_norm", self.size, config.rms_norm_eps)
        self.product = config.product(f"{name}.linear_end", self.size, self.size)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        x = self.norm(ops, self.clamped(ops, self.given(ops, batch)))
        return self.given(ops, batch, 1) + self.product(ops, ops.activation(x, self.config.hidden_act))


class ClampedNorm(AudioPart):
    def __init__(self, name: str, config: Gemma4AudioConfig):
        super().__init__(config)
        self.norm = RMSNorm(name, self.size, EPS)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.norm(ops, self.clamped(ops, self.given(ops, batch)))


class ConformerLayer(Layer):
    """Half a feed-forward, attention, a convolution over time, and the other half."""

    def __init__(self, name: str, config: Gemma4AudioConfig):
        size, width = config.hidden_size, config.conv_kernel_size
        self.config = config
        self.first = AudioFeedForward(f"{name}.feed_forward1", config)
        self.heads = AudioHeads(name, config)
        self.distances = RowLinear(NoNorm(), {f"{name}.self_attn.relative_k_proj": size}, size, bias=False)
        self.scales = Vectors({f"{name}.self_attn.per_dim_scale": config.head_dim})
        self.scales_are_positive = False
        """True if they are the softplus of what the Hub has, as in GGUF files."""
        self.output = AudioOutput(name, config)
        self.start = ConvolutionStart(f"{name}.lconv1d", config)
        kernel = f"{name}.lconv1d.depthwise_conv1d.weight"
        self.kernel = Vectors({kernel: size * width}, {kernel: TensorSource((size, 1, width))})
        self.end = ConvolutionEnd(f"{name}.lconv1d", config)
        self.second = AudioFeedForward(f"{name}.feed_forward2", config)
        self.norm = ClampedNorm(f"{name}.norm_out", config)

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        (name,) = self.scales.lengths
        if f"{name}_softplus" in tensors:
            self.scales = Vectors({f"{name}_softplus": self.config.head_dim})
            self.scales_are_positive = True
        super().choose(tensors)

    def run(self, x: Tensor, distances: Tensor, run: RunSlice) -> Generator[None, None, Tensor]:
        """Returns `[T, hidden]`; `distances`: the sinusoids of the rows that are seen."""

        def rows(part: Slice, *given: Tensor) -> Tensor:
            return run(part, rows_batch(torch.cat(given, 1)), ())

        x = rows(self.first, x)
        yield
        context = self.attend(rows(self.heads, x), rows(self.distances, distances))
        x = rows(self.output, context, x)
        yield
        x = rows(self.end, self.convolve(rows(self.start, x)), x)
        yield
        return rows(self.norm, rows(self.second, x))

    def convolve(self, x: Tensor) -> Tensor:
        """A sum over a row and those before it, for each channel."""
        kernel = self.kernel.values.view(x.shape[1], -1)
        width = kernel.shape[1]
        padded = functional.pad(x, (0, 0, width - 1, 0))
        y = padded[: len(x)] * kernel[:, 0]
        for place in range(1, width):
            y = y + padded[place : place + len(x)] * kernel[:, place]
        return y

    def attend(self, qkv: Tensor, distances: Tensor) -> Tensor:
        """Attention within chunks, `[T, hidden]`. A score has a part that depends on the distance."""
        config, length = self.config, len(qkv)
        chunk, context = config.attention_chunk_size, config.context
        before, after = config.attention_context_left - 1, config.attention_context_right
        q, k, v = (each.unflatten(1, (config.num_attention_heads, -1)) for each in qkv.float().chunk(3, 1))
        scales = self.scales.values if self.scales_are_positive else functional.softplus(self.scales.values)
        q = q * (config.head_dim**-0.5 / math.log(2)) * scales
        k = k * (math.log(1 + math.e) / math.log(2))
        blocks = -(-length // chunk)
        q = functional.pad(q, (0, 0, 0, 0, 0, blocks * chunk - length)).unflatten(0, (blocks, chunk))
        q = q.permute(2, 0, 1, 3)  # [heads, blocks, chunk, D]

        def seen(x: Tensor) -> Tensor:
            padded = functional.pad(x, (0, 0, 0, 0, before, after + chunk - 1 + chunk))
            return padded.unfold(0, context, chunk)[:blocks].permute(1, 0, 3, 2)  # [heads, blocks, context, D]

        relative = distances.float().unflatten(1, (config.num_attention_heads, -1)).permute(1, 2, 0)
        by_distance = q.flatten(1, 2) @ relative
        by_distance = functional.pad(by_distance, (0, context + 1 - by_distance.shape[2]))
        by_distance = by_distance.view(len(q), blocks, -1)[:, :, : chunk * context].unflatten(2, (chunk, context))
        cap = config.attention_logit_cap
        scores = torch.tanh((q @ seen(k).transpose(2, 3) + by_distance) / cap) * cap
        rows = torch.arange(blocks * chunk).view(blocks, chunk, 1)
        columns = torch.arange(blocks).view(blocks, 1, 1) * chunk + torch.arange(context) - before
        back = rows - columns
        is_seen = torch.where(back >= 0, back < before, -back < after) & (columns >= 0) & (columns < length)
        weights = scores.masked_fill(~is_seen, config.attention_invalid_logits_value).softmax(-1)
        return (weights @ seen(v)).permute(1, 2, 0, 3).flatten(2).flatten(0, 1)[:length].contiguous()


class Gemma4AudioTower(Tower):
    """The tensors that project rows, `embed_audio` in the checkpoint, are under `audio_tower.embed_audio` here."""

    kind = "audio"
    rows_a_second = 25
    clip_seconds = 30
    prefix = "audio_tower."
    input_names = ("input_features", "input_features_mask")

    def __init__(self, config: Gemma4AudioConfig, width: int, placeholder: int):
        """`width`: the text's hidden_size."""
        self.config = config
        self.width = width
        self.placeholder = placeholder
        name, (first, second) = "audio_tower.subsample_conv_projection", config.subsampling_conv_channels
        self.convolutions = [
            Subsampling(f"{name}.layer{number}", outputs, inputs, config.rms_norm_eps)
            for number, (outputs, inputs) in enumerate(((first, 1), (second, first)))
        ]
        size = config.hidden_size
        target = {f"{name}.input_proj_linear": size}
        self.entry = RowLinear(NoNorm(), target, first // 4 * second, bias=False)
        names = [f"audio_tower.layers.{index}" for index in range(config.num_hidden_layers)]
        self.layers = [ConformerLayer(name, config) for name in names]
        inner = config.output_proj_dims
        self.exit = RowLinear(NoNorm(), {"audio_tower.output_proj": inner}, size, bias=True)
        target = {"audio_tower.embed_audio.embedding_projection": width}
        self.projector = RowLinear(UnitNorm(inner, config.rms_norm_eps), target, inner, bias=False)

    def encode(self, media: Media, run: RunSlice) -> Generator[None, None, Tensor]:
        rows = torch.from_numpy(media.features)[None, :, :, None]
        for convolution in self.convolutions:
            rows = convolution.run(rows, run)
            yield
        x = run(self.entry, rows_batch(rows[0].flatten(1)), ())
        distances = sinusoids(self.config.context // 2, self.config.hidden_size)
        for layer in self.layers:
            x = yield from layer.run(x, distances, run)
            yield
        return run(self.projector, rows_batch(run(self.exit, rows_batch(x), ())), ())

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        clips = read_clips(*self.arrays_of(inputs), self.config.num_bands)
        return [self._media(*clip, index) for index, clip in enumerate(clips)]

    def blank(self, num_tokens: int) -> Media:
        features = np.zeros((FRAMES * num_tokens, self.config.num_bands), np.float32)
        return Media("audio", features, None, num_tokens, b"")

    def _media(self, features: Tensor, mask: Tensor, index: int) -> Media:
        frames = int(mask.sum())
        if not frames or not mask[:frames].all():
            raise ValueError(f"{self.input_names[1]} of clip {index} must be ones, and then zeros")
        found = features[:frames].detach().float().cpu().contiguous().numpy()
        digest = digest_of(f"frames {found.shape} ", found)
        return Media("audio", found, None, -(-frames // FRAMES), digest)


def sinusoids(farthest: int, size: int) -> Tensor:
    """float32 `[farthest + 1, size]`: sines, then cosines, of distances from `farthest` to 0."""
    half = size // 2
    frequencies = torch.exp(torch.arange(half) * -(math.log(10000.0) / max(half - 1, 1)))
    angles = torch.arange(farthest, -1, -1)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


def read_clips(features: Tensor, mask: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The frames `[N, k]` of each clip, and bool `[N]`, from `input_features` and `input_features_mask`. Raises
    ValueError for arrays of another form."""
    if not features.is_floating_point() or features.ndim != 3 or features.shape[2] != k:
        raise ValueError(
            f"input_features must be floats [clips, frames, {k}]; got {features.dtype} {list(features.shape)}"
        )
    if mask.shape != features.shape[:2]:
        raise ValueError(
            f"input_features_mask must be [clips, frames] of input_features, {list(features.shape[:2])}; got "
            f"{list(mask.shape)}"
        )
    return zip(features, mask.bool())
