"""Causal convolutions over the positions of each channel, whose state is their last inputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.linear import Linear
from pace.llm.layers.rotary import Angles
from pace.llm.layers.weight_target import TensorSource
from pace.ops.protocol import ForwardOps
from pace.states import State, StateSlots


class Convolution(Layer):
    """Causal convolution of each channel of `x [T, C]`: `activation(bias + w[0] x(t - L + 1) + ... + w[L - 1] x(t))`.

    `parts` maps prefixes in the checkpoint to numbers of channels, in order. Each has a tensor `.weight [channels, 1,
    L]` or `[channels, L]`, and with `bias` a tensor `.bias [channels]`."""

    def __init__(self, parts: Mapping[str, int], kernel: int, bias: bool = False, activation: str | None = None):
        self.parts = parts
        self.channels = sum(parts.values())
        self.kernel = kernel
        self.weight = self._weight(parts)
        self.bias = Vectors({f"{name}.bias": channels for name, channels in parts.items()} if bias else {})
        self.activation = activation

    def _weight(self, parts: Mapping[str, int], between: tuple[int, ...] = (1,)) -> Vectors:
        shapes = {f"{name}.weight": (channels, *between, self.kernel) for name, channels in parts.items()}
        sources = {name: TensorSource(shape) for name, shape in shapes.items()}
        return Vectors({name: shape[0] * self.kernel for name, shape in shapes.items()}, sources)

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """Takes the channels of each part from the checkpoint. transformers saves OLMo-Hybrid in three equal parts."""
        shapes = [tensors.get(f"{name}.weight", (0,)) for name in self.parts]
        if sum(shape[0] for shape in shapes) == self.channels:
            between = () if all(len(shape) == 2 for shape in shapes) else (1,)
            found = self._weight({name: shape[0] for name, shape in zip(self.parts, shapes)}, between)
            self.weight.lengths, self.weight.sources = found.lengths, found.sources

    def __call__(self, ops: ForwardOps, x: Tensor, kv: StateSlots, batch: ForwardBatch) -> Tensor:
        """Returns `[T, C]`; reads and writes the slots of `kv`."""
        weight = self.weight.values.view(self.channels, self.kernel)
        return ops.causal_conv(x, weight, self.bias.values, self.activation, kv, batch.states)


class ShortConvolution(Layer):
    """Gated convolution (LFM2): `residual + output(c * convolution(b * u))`, where the columns of `inputs` are
    `[b | c | u]`."""

    def __init__(self, inputs: Linear, convolution: Convolution, output: Linear):
        self.inputs = inputs
        self.convolution = convolution
        self.output = output
        self.cache = State(convolution.channels, convolution.kernel)

    @property
    def readers(self) -> list[Linear]:
        return [self.inputs]

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: StateSlots,
        residual: Tensor | None = None,
    ) -> Tensor:
        inputs, channels = self.inputs(ops, x), self.convolution.channels
        b, c, u = inputs[:, :channels], inputs[:, channels : 2 * channels], inputs[:, 2 * channels :]
        ops.gate_(u, b, None)
        y = self.convolution(ops, u, kv, batch)
        ops.gate_(y, c, None)
        return self.output(ops, y, residual=residual)
