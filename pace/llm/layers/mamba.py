"""Mamba-2 (arXiv 2405.21060): a recurrence whose decays, keys and queries depend on the input."""

from __future__ import annotations

import math

from torch import Tensor

from pace.batch import ForwardBatch, KVBlocks
from pace.llm.layers.attention import Attention
from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.convolution import Convolution
from pace.llm.layers.linear import Linear
from pace.llm.layers.norm import GatedNorm
from pace.llm.layers.recurrence import Rates
from pace.llm.layers.rotary import Angles
from pace.ops.protocol import ForwardOps, RecurrenceOptions
from pace.states import State, StateSlots


class Mamba(Layer):
    """Mamba-2: `residual + output(norm(recurrence(q, k, v), z))`.

    The columns of `inputs` are `[z | v | k | q | steps]`. z and v are gates and values of all heads, k and q are keys
    and queries of `groups` groups of heads. The last are a step for each head. Papers name v, k, q and the steps x, B,
    C and dt. The convolution runs over v, k and q."""

    def __init__(
        self,
        inputs: Linear,
        convolution: Convolution,
        rates: Rates,
        step_bias: Vectors,
        skip: Vectors,
        norm: GatedNorm | Gate,
        output: Linear,
        heads: int,
        head_dim: int,
        groups: int,
        state_dim: int,
        step_limits: tuple[float, float] = (0.0, math.inf),
        gate_scale: float = 1.0,
        step_scale: float = 1.0,
    ):
        """`rates`, `step_bias`, `skip` and `step_limits`: see `RecurrenceOptions`. A head's state is `[state_dim,
        head_dim]`. `gate_scale` and `step_scale` are factors of z and of the steps."""
        self.inputs = inputs
        self.convolution = convolution
        self.rates = rates
        self.step_bias = step_bias
        self.skip = skip
        self.norm = norm
        self.output = output
        self.groups = groups
        self.step_limits = step_limits
        self.gate_scale = gate_scale
        self.step_scale = step_scale
        self.cache = State(convolution.channels, convolution.kernel, heads, state_dim, head_dim)

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
        z, vkq, steps = self._columns(self.inputs(ops, x))
        for columns, factor in ((z, self.gate_scale), (steps, self.step_scale)):
            if factor != 1.0:
                ops.scale_(columns, factor)
        v, k, q = self._heads(self.convolution(ops, vkq, kv, batch))
        options = RecurrenceOptions(
            self.rates.values,
            self.step_bias.values,
            delta=False,
            skip=self.skip.values,
            step_limits=self.step_limits,
        )
        y = ops.recurrence(q, k, v, steps, None, kv, batch.states, options)
        return self.output(ops, self.norm(ops, y, z), residual=residual)

    def _columns(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views `[T, ...]` of `inputs`: z, the columns of the convolution, and the steps."""
        gates = self.cache.heads * self.cache.value_dim
        steps = gates + self.convolution.channels
        return inputs[:, :gates], inputs[:, gates:steps], inputs[:, steps:]

    def _heads(self, vkq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views `[T, H, D]` into the columns of `vkq`."""
        cache, values = self.cache, self.cache.heads * self.cache.value_dim
        keys = values + self.groups * cache.key_dim
        return (
            vkq[:, :values].unflatten(1, (cache.heads, cache.value_dim)),
            vkq[:, values:keys].unflatten(1, (self.groups, cache.key_dim)),
            vkq[:, keys:].unflatten(1, (self.groups, cache.key_dim)),
        )


class Gate(Layer):
    """`x * silu(gate)`, in place: a Mamba without a norm (Falcon-H1)."""

    def __call__(self, ops: ForwardOps, x: Tensor, gate: Tensor) -> Tensor:
        ops.gate_(x, gate, "silu")
        return x


class ParallelMixers(Layer):
    """Attention and Mamba-2 that read the same input (Falcon-H1): `residual + attention_scale * attention(x) +
    mamba_scale * mamba(x)`."""

    def __init__(self, attention: Attention, mamba: Mamba, attention_scale: float, mamba_scale: float):
        self.attention = attention
        self.mamba = mamba
        self.attention_scale = attention_scale
        self.mamba_scale = mamba_scale
        self.cache = (attention.cache, mamba.cache)

    @property
    def readers(self) -> list[Linear]:
        return [*self.attention.readers, *self.mamba.readers]

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: tuple[KVBlocks, StateSlots],
        residual: Tensor,
    ) -> Tensor:
        blocks, slots = kv
        y = self.attention(ops, x, angles, batch.of_layer(blocks), blocks)
        ops.scale_(y, self.attention_scale)
        of_mamba = self.mamba(ops, x, angles, batch, slots)
        ops.scale_(of_mamba, self.mamba_scale)
        return residual + (y + of_mamba)
