"""Linear attention: a matrix for each head takes the place of the keys and values of all positions."""

from __future__ import annotations

from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.convolution import Convolution
from pace.llm.layers.linear import FloatLinear, Linear
from pace.llm.layers.norm import GatedNorm
from pace.llm.layers.rotary import Angles
from pace.ops.protocol import ForwardOps, RecurrenceOptions
from pace.states import State, StateSlots


class Rates(Vectors):
    """`-exp(A)` of a vector A of the checkpoint: the rates of decay of a recurrence."""

    def from_file(self, values: Tensor) -> Tensor:
        return -values.double().exp()

    def to_file(self, values: Tensor) -> Tensor:
        return values.neg().log()


class DeltaNet(Layer):
    """Gated delta rule (arXiv 2412.06464): `residual + output(norm(recurrence(q, k, v), z))`.

    The columns of `inputs` are `key_heads` query heads, `key_heads` key heads, the value heads and their gates z. The
    convolution runs over all but z. The columns of `steps` are beta, then the step, both for each value head. In Kimi
    delta attention (arXiv 2510.26692), a head has a step for each row of its matrix. `gates_up` and `steps_up` make z
    and the steps of fewer columns."""

    def __init__(
        self,
        inputs: Linear,
        steps: FloatLinear,
        convolution: Convolution,
        rates: Rates,
        step_bias: Vectors,
        norm: GatedNorm,
        output: Linear,
        key_heads: int,
        key_dim: int,
        value_heads: int,
        value_dim: int,
        beta_scale: float = 1.0,
        tiled: bool = False,
        decay_dim: int = 1,
        lower_bound: float = 0.0,
        gates_up: Linear | None = None,
        steps_up: FloatLinear | None = None,
    ):
        """`decay_dim`: steps of a value head, 1 or `key_dim`. `rates`, `step_bias`, `beta_scale`, `tiled` and
        `lower_bound`: see `RecurrenceOptions`."""
        self.inputs = inputs
        self.steps = steps
        self.convolution = convolution
        self.rates = rates
        self.step_bias = step_bias
        self.norm = norm
        self.output = output
        self.key_heads = key_heads
        self.beta_scale = beta_scale
        self.tiled = tiled
        self.lower_bound = lower_bound
        self.gates_up = gates_up
        self.steps_up = steps_up
        self.cache = State(convolution.channels, convolution.kernel, value_heads, key_dim, value_dim, decay_dim)

    @property
    def readers(self) -> list[Linear]:
        return [self.inputs, self.steps]

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: StateSlots,
        residual: Tensor | None = None,
    ) -> Tensor:
        inputs, steps = self.inputs(ops, x), self.steps(ops, x)
        channels, heads = self.convolution.channels, self.cache.heads
        beta, steps, z = steps[:, :heads], steps[:, heads:], inputs[:, channels:]
        if self.steps_up is not None:
            steps = self.steps_up(ops, steps)
        if self.gates_up is not None:
            z = self.gates_up(ops, z)
        q, k, v = self._heads(self.convolution(ops, inputs[:, :channels], kv, batch))
        options = RecurrenceOptions(
            self.rates.values, self.step_bias.values, True, self.tiled, self.beta_scale, self.lower_bound
        )
        y = ops.recurrence(q, k, v, steps, beta, kv, batch.states, options)
        return self.output(ops, self.norm(ops, y, z), residual=residual)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views `[T, H, D]` into the columns of `qkv`."""
        cache, keys = self.cache, self.key_heads * self.cache.key_dim
        return (
            qkv[:, :keys].unflatten(1, (self.key_heads, cache.key_dim)),
            qkv[:, keys : 2 * keys].unflatten(1, (self.key_heads, cache.key_dim)),
            qkv[:, 2 * keys :].unflatten(1, (cache.heads, cache.value_dim)),
        )
