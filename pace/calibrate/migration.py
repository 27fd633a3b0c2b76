"""Moves channel scales from the layer that produces an activation into the products that read it, so that both round
better.

    (x / s) (W s)' = x W'      for every s [K] > 0

x / s is free if x is the output of something linear: scale the norm's weight or the matrix's rows. The float model does
not change, its rounded version does. AWQ (arXiv 2306.00978) chooses s to enlarge the columns that matter. SmoothQuant
(arXiv 2211.10438) chooses s to make the inputs' channels alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pace.calibrate.recording import InputStatistics
from pace.calibrate.rounding import LEVELS, fit_scales, importance, round_to_nearest
from pace.llm.layers import (
    Attention,
    DeltaNet,
    GatedMLP,
    Layer,
    Linear,
    MixtureOfExperts,
    NormedLinear,
    PlainMLP,
    ShortConvolution,
)
from pace.ops.weight_layout import WeightLayout

STRENGTHS = tuple(i / 10 for i in range(1, 11))
"""Strengths of migration that are tried, in addition to no migration."""

MAX_ROWS, MAX_ROWS_IN_ALL = 1024, 4096
"""Maximum number of rows on which strengths are compared: of one matrix, and of all matrices with the same input. They
are evenly spread."""

INPUT_GROUP = 128
"""Neighbouring inputs that the kernels quantise with one scale, unless the weight's groups are smaller (pace.ops)."""


@dataclass(frozen=True)
class Migration:
    """A place where channels may be scaled: their producer, and all products that read them."""

    readers: Sequence[Linear]
    divide: Callable[[Tensor], object]
    """`divide(s [K])` divides the channels by s at their producer."""
    channels: Callable[[Tensor], Tensor] = lambda s: s
    """Maps the desired scales `[K]` of channels to scales that `divide` can apply exactly."""


def migrations(layer: Layer) -> Iterator[Migration]:
    """Migrations of a decoder layer, in the order of its forward pass."""
    for norm, readers in layer.norm_readers():
        vectors = [
            vectors
            for vectors in (norm.weight, getattr(norm, "bias", None))
            if vectors is not None and vectors.values is not None
        ]
        if vectors:
            yield Migration(readers, lambda s, vectors=vectors: [v.values.div_(s) for v in vectors])
    for part in layer.children():
        if isinstance(part, Attention):
            if isinstance(part.output, NormedLinear):
                yield _of_norm(part.output)
            elif part.makes_plain_values:
                yield _of_values(part)
        elif isinstance(part, ShortConvolution):
            yield Migration([part.output], lambda s, part=part: divide_rows(part.inputs, len(s), s))
        elif isinstance(part, DeltaNet):
            yield _of_delta_net(part)
        elif isinstance(part, GatedMLP):
            yield _of_norm(part.down) if isinstance(part.down, NormedLinear) else _of_gated(part.gate_up, part.down)
        elif isinstance(part, MixtureOfExperts):
            yield from _of_mixture(part)
        elif isinstance(part, PlainMLP):
            yield from _of_plain(part.up, part.down, part.activation)


def _of_norm(product: NormedLinear) -> Migration:
    """Migration from the norm that only this product reads."""
    return Migration([product], lambda s: product.norm.weight.values.div_(s))


def _of_gated(gate_up: Linear, down: Linear) -> Migration:
    """Migration from the rows of up to the columns of down. It is exact for any gate."""
    return Migration([down], lambda s: divide_rows(gate_up, down.k, s))


def _of_plain(up: Linear, down: Linear, activation: str) -> Iterator[Migration]:
    """Migration through an activation that a factor passes: `relu(x / s) = relu(x) / s`, and for `relu2`, the square of
    it."""
    if activation == "relu":
        yield Migration([down], lambda s: divide_rows(up, 0, s))
    elif activation == "relu2":
        yield Migration([down], lambda s: divide_rows(up, 0, s.sqrt()))


def _of_mixture(mixture: MixtureOfExperts) -> Iterator[Migration]:
    """Migrations of a mixture's experts and of its shared MLP. Experts are skipped if their activation transforms
    up."""
    if isinstance(mixture.activation, str):
        for up, down in zip(mixture.gate_up.experts, mixture.down.experts, strict=True):
            yield from [_of_gated(up, down)] if mixture.gate_up.glu else _of_plain(up, down, mixture.activation)
    if isinstance(mixture.shared, PlainMLP):
        yield from _of_plain(mixture.shared.up, mixture.shared.down, mixture.shared.activation)
    elif mixture.shared:
        yield _of_gated(mixture.shared.gate_up, mixture.shared.down)


def _of_values(attention: Attention) -> Migration:
    """Migration from the rows of the values to the columns that read the heads' contexts. Query heads of a group share
    their values, and therefore one scale."""
    kv_heads, dim = attention.positions.kv_heads, attention.positions.value_dim
    group = attention.num_heads // kv_heads
    first = (attention.num_heads + kv_heads) * attention.positions.key_dim

    def shared(s: Tensor) -> Tensor:
        means = s.log().view(kv_heads, group, dim).mean(1, keepdim=True).exp()
        return means.expand(kv_heads, group, dim).flatten()

    def divide(s: Tensor) -> None:
        divide_rows(attention.qkv, first, s.view(kv_heads, group, dim)[:, 0].flatten())

    return Migration([attention.output], divide, shared)


def _of_delta_net(mixer: DeltaNet) -> Migration:
    """Migration from the norm of the heads' outputs. Heads share its weight, and therefore one scale."""
    heads = mixer.cache.heads

    def shared(s: Tensor) -> Tensor:
        return s.log().view(heads, -1).mean(0).exp().repeat(heads)

    return Migration([mixer.output], lambda s: mixer.norm.weight.values.div_(s.view(heads, -1)[0]), shared)


def divide_rows(product: Linear, first: int, s: Tensor) -> None:
    """Divides rows `first ..` of a product's weight and bias by s."""
    rows = slice(first, first + len(s))
    product.weight.matrix[rows] /= s[:, None]
    if product.bias.values is not None:
        product.bias.values[rows] /= s


def apply(migration: Migration, s: Tensor) -> None:
    """Applies a migration to a layer with float weights. The layer's outputs stay the same."""
    migration.divide(s)
    for reader in migration.readers:
        reader.weight.matrix.mul_(s)


# ----------------------------------------------------------------------------------------------------------------
# choosing


def awq(strength: float, inputs: InputStatistics, weight: Tensor) -> Tensor:
    """`(mean |x|)^strength`: the scale s of a channel before `centred`."""
    return (inputs.magnitudes / inputs.count) ** strength


def smoothquant(strength: float, inputs: InputStatistics, weight: Tensor) -> Tensor:
    """`max|x|^strength / max|W|^(1 - strength)`."""
    return inputs.largest**strength / weight.abs().amax(0).clamp_(min=1e-8) ** (1 - strength)


KINDS = {"awq": awq, "smoothquant": smoothquant}


def choose(
    migration: Migration, kind: str, inputs: InputStatistics, layouts: Sequence[Sequence[tuple[slice, WeightLayout]]]
) -> Tensor | None:
    """Returns the scales `[K]` with the least squared error of the readers' products on the samples, with weights and
    inputs rounded. None if no scales reduce the error.

    `layouts`: the quantised rows of each reader, and their layouts."""
    weights, parts = [], []
    num_rows = min(MAX_ROWS, max(1, MAX_ROWS_IN_ALL // len(migration.readers)))
    for reader, quantised in zip(migration.readers, layouts):
        for rows, layout in quantised:
            weight = reader.weight.matrix[rows]
            weights.append(weight[:: -(-len(weight) // num_rows)])
            parts.append(layout)
    if not weights:
        return None
    x = inputs.samples
    exact = [x @ weight.t() for weight in weights]
    best, best_error = None, _error(x, weights, parts, exact, inputs, torch.ones(x.shape[1]))
    together = torch.cat(weights)
    for strength in STRENGTHS:
        s = migration.channels(centred(KINDS[kind](strength, inputs, together)))
        error = _error(x, weights, parts, exact, inputs, s)
        if error < best_error:
            best, best_error = s, error
    return best


def centred(s: Tensor) -> Tensor:
    """Divides s by the geometric mean of its smallest and largest value, and clamps to 0.001 to 1000. Unused channels
    get 1."""
    used = s > 0
    if not used.any():
        return torch.ones_like(s)
    low, high = s[used].aminmax()
    return torch.where(used, s / (low * high).sqrt(), 1.0).clamp_(1e-3, 1e3)


def _error(
    x: Tensor,
    weights: list[Tensor],
    layouts: list[WeightLayout],
    exact: list[Tensor],
    inputs: InputStatistics,
    s: Tensor,
) -> float:
    total = 0.0
    mean_squares = importance(inputs.squares / inputs.count) / s.square()
    for weight, layout, wanted in zip(weights, layouts, exact):
        scaled = weight * s
        rounded = round_to_nearest(scaled, layout, fit_scales(scaled, layout, mean_squares)).dequantize()
        total += (quantised_inputs(x / s, layout) @ rounded.t() - wanted).double().square().sum().item()
    return total


def quantised_inputs(x: Tensor, layout: WeightLayout) -> Tensor:
    """Rounds inputs as the kernels do: to -127 to 127, relative to the largest of a group."""
    group = min(layout.group or INPUT_GROUP, INPUT_GROUP)
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scales = padded.abs().amax(-1, keepdim=True) / LEVELS["int8"][1]
    rounded = (padded / torch.where(scales == 0, 1.0, scales)).round_() * scales
    return rounded.flatten(1)[:, : x.shape[1]]
