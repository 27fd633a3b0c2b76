"""Rotary position embedding: the frequencies of every scaling kind, and the cosines and sines of a step.

The tables are computed once per step from the positions, and shared by all layers with the same rotation. The
frequencies of `dynamic` and `longrope` depend on the sequence length. They use each token's `rope_lengths` entry,
`max(prompt length, position + 1)`, so that its angle never depends on its chunk or batch.

Source of the formulas: `modeling_rope_utils.py` of transformers; YaRN is arXiv 2309.00071, LongRoPE arXiv 2402.13753.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pace.ops.protocol import ForwardOps

Angles = tuple[tuple[Tensor, Tensor], ...]
"""Cosines and sines `[T, R / 2]` in float32, for each of a model's tables; empty for a model without rotation."""


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotation of heads. `kind` is one of `default`, `linear`, `dynamic`, `llama3`, `yarn`,
    `longrope`, `proportional`. Fields that the kind does not use are ignored here; the config reader refuses invalid
    ones."""

    kind: str
    theta: float
    dim: int
    """The R of R / 2 frequencies: head_dim * partial_rotary_factor, rounded down."""
    max_positions: int
    """Training length of a `dynamic` model; the base grows beyond it."""
    original_max_positions: int = 0
    """Length before extension, for llama3, yarn and longrope."""
    factor: float = 1.0
    attention_factor: float = 1.0
    """Factor of cosines and sines."""
    long_attention_factor: float | None = None
    """Factor for longrope at lengths that use the long factors; None for `attention_factor`."""
    mscale_all_dim: float = 0.0
    """The mscale of the score scale in latent attention (`LatentConfig.attention_scale`), for yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    rotated: int = 0
    """Number of the first frequencies that are not zero, for proportional: other pairs do not turn."""
    interleaved: bool = False
    """True if pairs are adjacent elements (GPT-J), not halves."""
    sections: tuple[int, int, int] | None = None
    """Frequencies for the positions in time, height and width (M-RoPE); None if a token has one position."""
    backwards: bool = False
    """True if heads are rotated by the negative angle."""
    alternates: bool = False
    """True if the frequencies of the sections alternate: time, height, width, time, ... Otherwise the sections follow
    each other, and are all of the frequencies."""


class Rotary:
    """Computes the angles of a step, and rotates heads by them. Has no weights in the checkpoint."""

    def __init__(self, config: RopeConfig, table: int = 0):
        """`table`: index of this rotation's table in `Angles`."""
        self.config = config
        self.table = table
        self.half = -(-config.dim // 2)
        self.frequencies = FREQUENCIES[config.kind](config)
        self.axes = None if config.sections is None else axes_of_frequencies(config)
        self._grow_tables(1)

    def angles(self, positions: Tensor, rope_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines `[T, R / 2]`, float32, of int64 `[T]` positions and lengths. Positions may also be
        `[3, T]`, in time, height and width. Then `sections` choose one for each frequency.

        **Numerics**: angle = float32(position) * float32 frequency, rounded to float32 like transformers. Its cosine is
        computed in float64 and rounded once, so that a row does not depend on its place in a vectorised loop."""
        if positions.ndim == 2:
            cos, sin = self.angles(positions.flatten(), rope_lengths.repeat(3))
            return self._by_axis(cos), self._by_axis(sin)
        if not isinstance(self.frequencies, FixedFrequencies):
            return self._compute(positions, rope_lengths)
        try:
            return self._look_up(positions)
        except IndexError:
            # A sequence is longer than all before it. Finding the largest position in every step would take longer.
            self._grow_tables(1 << int(positions.max()).bit_length())
            return self._look_up(positions)

    def regime(self, length: int) -> int:
        """Identifies the angles of a prompt of this length and of the tokens after it. Two lengths with the same number
        have the same angles."""
        return self.frequencies.regime(length)

    def _grow_tables(self, count: int) -> None:
        """Computes the angles of positions 0, 1, ..., for frequencies that do not depend on the length."""
        cos, sin = self._compute(torch.arange(count), torch.arange(count))
        self._tables = cos.numpy(), sin.numpy()

    def _look_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = positions.numpy()  # numpy takes a row or two in a tenth of torch's time
        cos, sin = self._tables
        return torch.from_numpy(cos.take(rows, 0)), torch.from_numpy(sin.take(rows, 0))

    def _compute(self, positions: Tensor, rope_lengths: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions.float()[:, None] * self.frequencies(rope_lengths)).double()
        if self.config.backwards:
            angle = -angle
        factor = self._factor(rope_lengths)
        return (angle.cos() * factor).float(), (angle.sin() * factor).float()

    def _by_axis(self, tables: Tensor) -> Tensor:
        """Chooses from tables `[3 T, R / 2]` of three positions of each token."""
        assert self.axes is not None, "tokens have three positions, and this rotation has no sections"
        tables = tables.view(3, -1, self.half)
        return tables.gather(0, self.axes.expand(1, tables.shape[1], -1))[0]

    def _factor(self, rope_lengths: Tensor) -> float | Tensor:
        """Returns the factor of cosines and sines: one number, or float64 `[T, 1]`."""
        config = self.config
        if config.long_attention_factor is None:
            return config.attention_factor
        factors = torch.tensor([config.attention_factor, config.long_attention_factor], dtype=torch.float64)
        return factors[(rope_lengths > config.original_max_positions).long()][:, None]

    def rotate_(self, ops: ForwardOps, x: Tensor, angles: Angles) -> None:
        """Rotates the heads of `x [T, H, D]` in place."""
        cos, sin = angles[self.table]
        ops.rotary_(x, cos, sin, self.config.interleaved)


class Temperature:
    """Multiplies heads by `1 + scale * log(1 + floor((position + offset) / period))`, computed as a rotation with these
    cosines and sines of 0. The scores then grow with the position (arXiv 2501.19399)."""

    def __init__(self, head_dim: int, period: int, scale: float, table: int, offset: int = 1):
        """`table`: index of this rotation's table in `Angles`."""
        self.half = head_dim // 2
        self.period = period
        self.scale = scale
        self.table = table
        self.offset = offset

    def angles(self, positions: Tensor, rope_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns factors and zeros `[T, D / 2]`, float32, of int64 `[T]` positions; computed in float64 and rounded
        once."""
        factors = 1 + self.scale * ((positions + self.offset) // self.period).double().log1p()
        cos = factors.float()[:, None].repeat(1, self.half)
        return cos, torch.zeros_like(cos)

    def regime(self, length: int) -> int:
        return 0

    def rotate_(self, ops: ForwardOps, x: Tensor, angles: Angles) -> None:
        """Multiplies the heads of `x [T, H, D]` in place; D must be even."""
        cos, sin = angles[self.table]
        ops.rotary_(x, cos, sin, False)


class NoRotary:
    """Null object for layers without positions, or with learned ones."""

    def rotate_(self, ops: ForwardOps, x: Tensor, angles: Angles) -> None:
        pass


def axes_of_frequencies(config: RopeConfig) -> Tensor:
    """int64 `[R / 2]`: 0, 1 or 2 for a frequency of the position in time, height or width."""
    time, height, width = config.sections
    if not config.alternates:
        return torch.arange(3).repeat_interleave(torch.tensor([time, height, width]))
    axes = torch.zeros(-(-config.dim // 2), dtype=torch.int64)
    for axis, count in ((1, height), (2, width)):
        axes[axis : 3 * count : 3] = axis
    return axes


# ------------------------------------------------------------------------------------------------------------
# frequencies
# A frequency object is called with rope_lengths [T]. It returns float32 [R / 2] (the same for all tokens) or
# [T, R / 2].


class FixedFrequencies:
    """Frequencies that do not depend on the length."""

    def __init__(self, frequencies: Tensor):
        self.frequencies = frequencies

    def __call__(self, rope_lengths: Tensor) -> Tensor:
        return self.frequencies

    def regime(self, length: int) -> int:
        return 0


class DynamicFrequencies:
    """NTK-aware scaling: beyond the training length, the base grows with the sequence's length."""

    def __init__(self, config: RopeConfig):
        self.config = config
        self.exponents = _exponents(config).double()

    def __call__(self, rope_lengths: Tensor) -> Tensor:
        config = self.config
        stretch = rope_lengths.clamp(min=config.max_positions).double() / config.max_positions
        growth = config.factor * stretch - (config.factor - 1)
        base = config.theta * growth ** (config.dim / (config.dim - 2))
        return (base[:, None] ** -self.exponents).float()

    def regime(self, length: int) -> int:
        return max(length, self.config.max_positions)


class LongRopeFrequencies:
    """One set of factors up to the original length, another one beyond it."""

    def __init__(self, config: RopeConfig):
        self.original_max_positions = config.original_max_positions
        powers = config.theta ** _exponents(config)
        self.short = 1.0 / (torch.tensor(config.short_factor, dtype=torch.float32) * powers)
        self.long = 1.0 / (torch.tensor(config.long_factor, dtype=torch.float32) * powers)

    def __call__(self, rope_lengths: Tensor) -> Tensor:
        return torch.where((rope_lengths > self.original_max_positions)[:, None], self.long, self.short)

    def regime(self, length: int) -> int:
        return int(length > self.original_max_positions)


def _exponents(config: RopeConfig) -> Tensor:
    """Returns `[R / 2]`: 0, 2 / R, 4 / R, ... in float32."""
    return torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim


def _plain(config: RopeConfig) -> Tensor:
    return 1.0 / config.theta ** _exponents(config)


def _llama3(config: RopeConfig) -> Tensor:
    """Stretches long waves by `factor`, and keeps short ones. Interpolates those in between, if `low_freq_factor` and
    `high_freq_factor` differ."""
    plain = _plain(config)
    turns = config.original_max_positions * plain / (2 * math.pi)  # full turns within the original length
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = (turns >= low).float() if low == high else ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / config.factor + kept * plain


def _yarn(config: RopeConfig) -> Tensor:
    """Like llama3, with a ramp that is linear in the index of the frequency."""

    def index_with_turns(turns: float) -> float:
        length = config.original_max_positions
        return config.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = index_with_turns(config.beta_fast), index_with_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.dim - 1)
    if first == last:
        last += 0.001  # avoids a division by zero
    plain = _plain(config)
    stretched = ((torch.arange(len(plain), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / config.factor * stretched + plain * (1 - stretched)


def _proportional(config: RopeConfig) -> Tensor:
    frequencies = _plain(config) / config.factor
    frequencies[config.rotated :] = 0
    return frequencies


FREQUENCIES = {
    "default": lambda config: FixedFrequencies(_plain(config)),
    "linear": lambda config: FixedFrequencies(_plain(config) / config.factor),
    "dynamic": DynamicFrequencies,
    "llama3": lambda config: FixedFrequencies(_llama3(config)),
    "yarn": lambda config: FixedFrequencies(_yarn(config)),
    "longrope": LongRopeFrequencies,
    "proportional": lambda config: FixedFrequencies(_proportional(config)),
}
"""Kind of scaling -> its frequencies: all implemented kinds."""
