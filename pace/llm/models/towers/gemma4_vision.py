"""The vision tower of Gemma 4 (E2B, E4B, 26B-A4B and 31B).

An image of any shape is a grid of patches. Every patch has learned positions of its column and its row, and heads turn
by both. Neighbouring patches are pooled to one row for the text model. Source: `modeling_gemma4.py` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.batch import Positions
from pace.llm.layers import (
    Attention,
    Block,
    FeedForward,
    GatedLinear,
    GatedMLP,
    HeadNorm,
    HeadUnitNorm,
    Layer,
    Linear,
    NoRotary,
    RMSNorm,
    RopeConfig,
    Rotary,
    TensorSource,
    UnitNorm,
    Vectors,
)
from pace.llm.layers.rotary import Angles
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, activation, count, flag, number
from pace.llm.models.towers.image_tower import ImageTower
from pace.llm.models.towers.parts import PatchEmbedding, RowLinear, VisionBlock, join_patches
from pace.llm.models.towers.tower import RunSlice, read_arrays, rows_batch
from pace.llm.models.towers.vision_config import MAX_SIZE, VisionConfig, axial_theta
from pace.media.media import Media, digest_of
from pace.ops.experts import Clamp
from pace.ops.protocol import ForwardOps

INPUT_NAMES = ("pixel_values", "image_position_ids")
CHANNELS = 3
LIMITS = ("input_min", "input_max", "output_min", "output_max")
"""Names of the limits of a product."""


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """Fields of `vision_config` in config.json."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma4_vision",)
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"attention_bias", "default_output_length", "global_head_dim", "max_position_embeddings"}
    )

    hidden_size: int = count(768, MAX_SIZE)
    intermediate_size: int = count(3072)
    num_hidden_layers: int = count(16, MAX_LAYERS)
    num_attention_heads: int = count(12)
    num_key_value_heads: int = count(12)
    head_dim: int = count(64, MAX_HEAD_DIM)
    hidden_activation: str = activation("gelu_tanh")
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    rope_parameters: float = axial_theta(100.0, ("axial", "default"))
    pooling_kernel_size: int = count(3, 64, minimum=2)
    """Side of the square of patches that becomes one row."""
    patch_size: int = count(16, 512)
    position_embedding_size: int = count(10240, MAX_SIZE)
    """Number of positions of each axis."""
    use_clipped_linears: bool = flag(False)
    """True if inputs and outputs of the products in blocks have limits."""
    standardize: bool = flag(False)
    """True if pooled rows are shifted and scaled."""

    def check(self) -> None:
        if self.head_dim % 4:
            raise ValueError(f"config.json: vision_config.head_dim must be a multiple of 4; got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "config.json: vision_config.num_attention_heads must be a multiple of num_key_value_heads; got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )

    @property
    def cache(self) -> Positions:
        """What a block keeps of each patch."""
        return Positions(self.num_key_value_heads, self.head_dim, self.head_dim)

    @property
    def patch_elements(self) -> int:
        return CHANNELS * self.patch_size**2


class ClippedLinear(Layer):
    """`residual + clamp(clamp(x) W')`. The limits of inputs and outputs are scalars in the checkpoint."""

    def __init__(self, name: str, n: int, k: int):
        self.matrix = Linear({f"{name}.linear": n}, k)
        self.limits = Vectors({f"{name}.{limit}": 1 for limit in LIMITS})

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().choose(tensors)
        scalars = [name for name in self.limits.lengths if tensors.get(name) == ()]
        self.limits.sources = {name: TensorSource(()) for name in scalars}

    def __call__(self, ops: ForwardOps, x: Tensor, activation: None = None, residual: Tensor | None = None) -> Tensor:
        (y,) = multiply(ops, x, [self])
        return y if residual is None else residual + y

    @property
    def clamps(self) -> tuple[Clamp | None, Clamp | None]:
        """The clamps of inputs and outputs; None for limits that are infinite."""
        given = dict(zip(self.limits.lengths, self.limits.values.tolist()))
        names = list(given)
        return clamp(given, *names[:2]), clamp(given, *names[2:])


def clamp(limits: Mapping[str, float], low: str, high: str) -> Clamp | None:
    """The clamp of two limits, by name. Raises ValueError if none fits."""
    if limits[low] == -torch.inf and limits[high] == torch.inf:
        return None
    if not limits[low] <= limits[high]:
        raise ValueError(f"the tensor {low} is {limits[low]}; it must be at most {high}, {limits[high]}")
    return Clamp(limits[low], limits[high])


def multiply(ops: ForwardOps, x: Tensor, linears: Sequence[ClippedLinear]) -> list[Tensor]:
    """Products of x. Those with the same limits of inputs share a clamped x."""
    inputs: dict[Clamp | None, Tensor] = {None: x}
    outputs = []
    for linear in linears:
        of_input, of_output = linear.clamps
        if of_input not in inputs:
            inputs[of_input] = ops.activation(x, of_input)
        outputs.append(linear.matrix(ops, inputs[of_input], of_output))
    return outputs


class ClippedHeads(Layer):
    """Queries, keys and values, side by side, whose products have limits of their own."""

    def __init__(self, name: str, rows: Sequence[int], k: int):
        self.linears = [ClippedLinear(f"{name}.{part}_proj", n, k) for part, n in zip("qkv", rows)]

    def __call__(self, ops: ForwardOps, x: Tensor, activation: None = None) -> Tensor:
        q, k, v = multiply(ops, x, self.linears)
        return ops.concatenate(ops.concatenate(q, k), v)


class ClippedMLP(Layer):
    """`residual + down(act(gate(x)) * up(x))`, with limits."""

    operator = "mlp"
    readers: ClassVar[list[Linear]] = []

    def __init__(self, name: str, config: Gemma4VisionConfig):
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up = [ClippedLinear(f"{name}.{part}_proj", inner, size) for part in ("gate", "up")]
        self.down = ClippedLinear(f"{name}.down_proj", size, inner)
        self.activation = config.hidden_activation

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        gate, up = multiply(ops, x, self.gate_up)
        y = ops.activation(gate, self.activation)
        ops.gate_(y, up, None)
        return self.down(ops, y, residual=residual)


class AxialRotary(NoRotary):
    """Turns the first half of each head by the column, and the second half by the row: tables 0 and 1 of the angles."""

    def __init__(self, theta: float, head_dim: int):
        self.part = head_dim // 2
        self.rotary = Rotary(RopeConfig("default", theta, self.part, 2))

    def rotate_(self, ops: ForwardOps, x: Tensor, angles: Angles) -> None:
        for table, (cos, sin) in enumerate(angles):
            ops.rotary_(x[:, :, table * self.part : (table + 1) * self.part], cos, sin, False)


class AxialBlock(VisionBlock):
    """A block whose heads turn by the angles of two axes."""

    def __init__(self, block: Block, config: Gemma4VisionConfig):
        super().__init__(block, config.hidden_size, config.cache, None)
        self.angle_halves = (config.head_dim // 4,) * 2


class Gemma4VisionTower(ImageTower):
    """Pooled rows are normalised and projected. That part's tensors, `embed_vision` in the checkpoint, are under
    `vision_tower.embed_vision` here."""

    prefix = "vision_tower."
    input_names = INPUT_NAMES

    def __init__(self, config: Gemma4VisionConfig, width: int, placeholder: int):
        """`width`: the text's hidden_size."""
        self.config = config
        self.width = width
        self.placeholder = placeholder
        self.cache = config.cache
        size, name = config.hidden_size, "vision_tower.patch_embedder"
        self.patches = PatchEmbedding(f"{name}.input_proj", size, (config.patch_elements,), bias=False, positions=True)
        shape, table = (2, config.position_embedding_size, size), f"{name}.position_embedding_table"
        self.positions = Vectors({table: 2 * shape[1] * size}, {table: TensorSource(shape)})
        self.rotary = AxialRotary(config.rope_parameters, config.head_dim)
        self.blocks = [
            AxialBlock(self.make_block(f"vision_tower.encoder.layers.{index}"), config)
            for index in range(config.num_hidden_layers)
        ]
        standard = ("vision_tower.std_bias", "vision_tower.std_scale") if config.standardize else ()
        self.standard = Vectors(dict.fromkeys(standard, size))
        target = {"vision_tower.embed_vision.embedding_projection": width}
        self.projector = RowLinear(UnitNorm(size, config.rms_norm_eps), target, size, bias=False)

    def make_block(self, name: str) -> Block:
        config = self.config
        size, eps = config.hidden_size, config.rms_norm_eps
        mlp: FeedForward
        if config.use_clipped_linears:
            mlp = ClippedMLP(f"{name}.mlp", config)
        else:
            inner = {f"{name}.mlp.{part}_proj.linear": config.intermediate_size for part in ("gate", "up")}
            down = Linear({f"{name}.mlp.down_proj.linear": size}, config.intermediate_size)
            mlp = GatedMLP(GatedLinear(inner, size), down, config.hidden_activation)
        return Block(
            RMSNorm(f"{name}.input_layernorm", size, eps),
            self.make_attention(f"{name}.self_attn"),
            RMSNorm(f"{name}.pre_feedforward_layernorm", size, eps),
            mlp,
            mixer_post_norm=RMSNorm(f"{name}.post_attention_layernorm", size, eps),
            mlp_post_norm=RMSNorm(f"{name}.post_feedforward_layernorm", size, eps),
        )

    def make_attention(self, name: str) -> Attention:
        config = self.config
        size, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        rows = [heads * dim for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        qkv: Linear | ClippedHeads
        output: Linear | ClippedLinear
        if config.use_clipped_linears:
            qkv = ClippedHeads(name, rows, size)
            output = ClippedLinear(f"{name}.o_proj", size, rows[0])
        else:
            qkv = Linear({f"{name}.{part}_proj.linear": n for part, n in zip("qkv", rows)}, size)
            output = Linear({f"{name}.o_proj.linear": size}, rows[0])
        return Attention(
            qkv,
            output,
            config.num_attention_heads,
            config.cache,
            self.rotary,
            HeadNorm(f"{name}.q_norm", dim, eps),
            HeadNorm(f"{name}.k_norm", dim, eps),
            scale=1.0,
            value_norm=HeadUnitNorm(dim, eps),
        )

    # -- a run

    def patches_of(self, media: Media) -> Tensor:
        return 2 * (torch.from_numpy(media.features) - 0.5)

    def positions_of(self, media: Media) -> Tensor:
        of_columns, of_rows = self.positions.values.view(2, self.config.position_embedding_size, -1)
        columns, rows = places(media)
        return of_columns[columns] + of_rows[rows]

    def angles_of(self, media: Media) -> Angles:
        return tuple(self.rotary.rotary.angles(axis, axis) for axis in places(media))

    def project(self, x: Tensor, media: Media, run: RunSlice) -> Tensor:
        side, size = self.config.pooling_kernel_size, self.config.hidden_size
        joined = join_patches(x, media.grid, side).split(size, 1)
        pooled = joined[0]
        for patch in joined[1:]:
            pooled = pooled + patch
        pooled = pooled / side**2 * size**0.5
        if self.config.standardize:
            bias, scale = self.standard.values.split(size)
            pooled = (pooled - bias) * scale
        return run(self.projector, rows_batch(pooled), ())

    # -- inputs

    def read_inputs(self, inputs: Mapping[str, Any]) -> list[Media]:
        config = self.config
        return read_grids(inputs, config.patch_elements, config.pooling_kernel_size, config.position_embedding_size)

    def blank(self, num_tokens: int) -> Media:
        return blank_image(num_tokens, self.config.patch_elements, self.config.pooling_kernel_size)


def places(media: Media) -> tuple[Tensor, Tensor]:
    """int64 `[N]` each: column and row of the patches of one tile."""
    _, rows, columns = media.grid
    grid = torch.arange(rows * columns)
    return grid % columns, grid // columns


def blank_image(num_tokens: int, k: int, side: int) -> Media:
    """The largest image of zeros that is nearly a square and has at most this number of tokens."""
    rows = max(1, math.isqrt(num_tokens))
    columns = max(1, num_tokens // rows)
    patches = np.zeros((rows * columns * side**2, k), np.float32)
    return Media("image", patches, (1, rows * side, columns * side), rows * columns, bytes(32))


def read_grids(inputs: Mapping[str, Any], k: int, side: int, num_positions: int) -> list[Media]:
    """Makes media of `pixel_values [images, P, k]` and `image_position_ids [images, P, 2]`. The latter has column and
    row of each patch, and -1 behind the last one. `side`: side of the square of patches that becomes one row. Raises
    ValueError for arrays that do not have a whole image each."""
    patches, positions = read_arrays(inputs, "image", INPUT_NAMES)
    if not patches.is_floating_point() or patches.ndim != 3 or patches.shape[2] != k:
        raise ValueError(f"pixel_values must be floats [images, P, {k}]; got {patches.dtype} {list(patches.shape)}")
    if positions.is_floating_point() or positions.shape != (*patches.shape[:2], 2):
        raise ValueError(
            f"image_position_ids must be integers {[*patches.shape[:2], 2]}, for the patches of pixel_values; got "
            f"{positions.dtype} {list(positions.shape)}"
        )
    return [_media(*pair, index, side, num_positions) for index, pair in enumerate(zip(patches, positions.cpu()))]


def _media(patches: Tensor, positions: Tensor, index: int, side: int, num_positions: int) -> Media:
    columns, rows = (int(last) + 1 for last in positions.amax(0)) if len(positions) else (0, 0)
    number = rows * columns
    whole = torch.arange(number)
    if (
        not number
        or rows % side
        or columns % side
        or number > len(positions)
        or not torch.equal(positions[:number].long(), torch.stack([whole % columns, whole // columns], 1))
        or not (positions[number:] == -1).all()
    ):
        raise ValueError(
            f"image_position_ids of image {index} must be column and row of all patches, row by row, and then -1; rows "
            f"and columns are multiples of {side}"
        )
    if max(rows, columns) > num_positions:
        raise ValueError(
            f"image {index} has {rows} rows and {columns} columns of patches; this tower has {num_positions} positions"
        )
    found = patches[:number].detach().float().cpu().contiguous().numpy()
    digest = digest_of(f"patches {rows} {columns} {found.shape[1]} ", found)
    return Media("image", found, (1, rows, columns), number // side**2, digest)
