"""Classifiers of encoders: the logits of labels from a pooled row of a text.

No QuantizationConfig quantises the matrices of a head.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from pace.llm.layers import FloatLinear, Layer, LayerNorm, NoNorm
from pace.ops.experts import Activation
from pace.ops.protocol import ForwardOps


class Head(Layer):
    """`output(norm(activation(dense(x))))` of pooled rows `x [S, hidden]`: logits `[S, labels]`."""

    operator: ClassVar[str] = "lm_head"

    def __init__(
        self,
        dense: str,
        activation: Activation,
        output: str,
        hidden_size: int,
        num_labels: int,
        pooling: tuple[str, ...] = ("cls",),
        norm: LayerNorm | NoNorm | None = None,
        biases: tuple[bool, bool] = (True, True),
    ):
        """`dense`, `output`: names of the two matrices, `[hidden, hidden]` and `[labels, hidden]`. `pooling`: names in
        `POOLINGS` of the rows that it reads. `biases`: whether each matrix has one."""
        self.dense = FloatLinear({dense: hidden_size}, hidden_size, biases[0])
        self.activation = activation
        self.norm = norm or NoNorm()
        self.output = FloatLinear({output: num_labels}, hidden_size, biases[1])
        self.pooling = pooling

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.output(ops, self.norm(ops, self.dense(ops, x, self.activation)))

    def prepare(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """Returns what is pooled, computed from the rows of all tokens `x [T, hidden]`."""
        return x


class LateHead(Head):
    """`output(pooled(activation(dense(x))))` of the rows of all tokens."""

    def prepare(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.dense(ops, x, self.activation)

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.output(ops, x)


class PlainHead(Head):
    """`output(x)` of pooled rows `x [S, hidden]`."""

    def __init__(self, output: str, hidden_size: int, num_labels: int, pooling: tuple[str, ...] = ("cls",)):
        self.output = FloatLinear({output: num_labels}, hidden_size, bias=True)
        self.pooling = pooling

    def __call__(self, ops: ForwardOps, x: Tensor) -> Tensor:
        return self.output(ops, x)
