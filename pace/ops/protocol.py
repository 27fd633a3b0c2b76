"""`Ops`: what the operations that models are made of promise, whoever computes them.

`pace.ops.native` (C++ kernels) and `pace.ops.reference` (plain torch) have all of these functions. `pace.graph.recorded`
(on symbols) and `RoutedOps` of the eager runner have those of `ForwardOps`. `tests/ops/test_protocol.py` holds each to
these names, parameters and defaults.

Shapes use T tokens, N outputs, K inputs, H heads of D elements, R rows of logits over V words. Activations are float32
in `native`; in `reference` they have the dtype of what they are computed from, float32 or float64. A function whose
name ends in `_` works in place, and no other changes its arguments, but for `store_kv`, which writes the cache. Results
are new tensors.

`native` raises ValueError for a wrong shape, dtype or stride, and TypeError for a dtype that is supported nowhere. A
recorded program raises the same for what varies from step to step (ids, slots, spans), before anything is computed.
`reference` raises what torch does, unless "Raises" says more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pace.ops.blocks import BlockRows
from pace.ops.draws import Drawn, Draws
from pace.ops.experts import ClampedSwiglu, Router
from pace.ops.quantizer import Quantizer
from pace.ops.weight_layout import AnyLayout, QuantizedRows

if TYPE_CHECKING:
    from pace.batch import LayerBlocks, Spans


class Weight(Protocol):
    """A matrix `[n, k]` as an implementer stores it. With `glu`, its rows are `[gate; up]`, n / 2 each."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def layout(self) -> AnyLayout:
        """How it is stored."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what `unpack` gives: the layout itself, or float32 of a quantised or mixed weight."""

    @property
    def glu(self) -> bool: ...
    @property
    def order(self) -> Tensor | None:
        """int64 `[k]`: column j of the codes belongs to column `order[j]` of the input; None: each to its own."""

    @property
    def nbytes(self) -> int: ...


class Stack(Protocol):
    """One product of all experts of a mixture, or of all heads, as an implementer stores it: weights `[n, k]` of one
    layout."""

    @property
    def experts(self) -> Sequence[Weight]: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def layout(self) -> AnyLayout: ...
    @property
    def glu(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...


class ForwardOps(Protocol):
    """What the forward pass of a model calls.

    A row of a result depends on the same row of the arguments (or on the same token's span) alone: not on the number
    of rows, on its neighbours, or on threads."""

    def embedding(self, ids: Tensor, weight: Weight) -> Tensor:
        """`[T, K]`: row `ids[t]` of the weight, widened to float32, of int64 `ids [T]`.

        Raises ValueError for an id outside of the weight, TypeError (`native`) for ids of another dtype."""

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`[T, N]`: `residual [T, N] + activation(x [T, K] W' + bias [N])`, each part optional.

        x may have any row stride; the residual is contiguous. The weight is one without `glu`. Raises ValueError
        (`native`) for an unknown activation."""

    def linear_glu(self, x: Tensor, weight: Weight, activation: str, bias: Tensor | None = None) -> Tensor:
        """`[T, N / 2]`: `activation(x Wg' + bg) * (x Wu' + bu)` where the rows of the weight (and of `bias [N]`) are
        `[gate; up]`.

        x may have any row stride. The weight is one with `glu`."""

    def activation(self, x: Tensor, name: str) -> Tensor:
        """`name` of every element of x, in the shape of x: silu, gelu, gelu_new, gelu_tanh, gelu_fast, quick_gelu or
        relu. gelu_new, gelu_tanh and gelu_fast are one function."""

    def scale_(self, x: Tensor, factor: float) -> None:
        """Multiplies `x [T, K]` by a finite number, which is rounded to float32; x may have any row stride."""

    def softcap_(self, x: Tensor, cap: float) -> None:
        """Replaces `x [T, K]` by `cap * tanh(x / cap)`, between -cap and cap, of a positive cap; NaN stays NaN. x may
        have any row stride."""

    def gate_(self, x: Tensor, gate: Tensor) -> None:
        """Multiplies every row of `x [T, K]` by `sigmoid(gate)` of `gate [T, 1]`; both may have any row stride."""

    def route(self, logits: Tensor, router: Router, choice_bias: Tensor | None = None) -> Tensor:
        """`[T, 2 top_k]`: the numbers of the experts that each row of `logits [T, E]` chooses, ascending, then their
        weights. `choice_bias [E]` is added to scores for the choice alone. logits may have any row stride.

        A row whose scores hold NaN chooses the first experts, with NaN as weights."""

    def experts(
        self,
        x: Tensor,
        gate_up: Stack,
        down: Stack,
        routing: Tensor,
        activation: str | ClampedSwiglu,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        residual: Tensor | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        """`[T, H]`: `residual + w1 f1(x) + w2 f2(x) + ...` for `x [T, K]`, added in this order; 0 for no residual.

        The experts e and weights w of a row are those of `routing [T, 2 top_k]`, as `route` makes it, and
        `fe(x) = h We' + be`, `h = activation(x Wg' + bg) * (x Wu' + bu)` or what a ClampedSwiglu makes of the two.
        `gate_up` has rows `[gate; up]`, made with `glu`; biases are `[E, n]`, those of gate and up in one. x may have
        any row stride; the residual is contiguous. An expert that no row chooses is not read. With `weigh_inputs`, it is
        `f1(w1 x) + f2(w2 x) + ...`.

        Raises ValueError (`native`) for stacks that do not fit each other, and for a routing that no router makes."""

    def heads_linear(self, x: Tensor, weights: Stack) -> Tensor:
        """`[T, H * N]`: `x[:, h] W_h'` for every head h of `x [T, H, K]`, each with a weight `[N, K]` of its own; x may
        be a strided view with contiguous heads. The weights are without `glu`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`[T, K]`: `x / sqrt(mean(x^2) + eps) * weight [K]`; x may have any row stride."""

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """`[T, K]`: `(x - mean(x)) / sqrt(var(x) + eps) * weight [K] + bias [K]`, population variance; x may have any
        row stride."""

    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Replaces every head of `x [T, H, D]` by its `rms_norm` with one `weight [D]`; x may be a strided view with
        contiguous heads."""

    def head_layer_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Replaces every head of `x [T, H, D]` by its `layer_norm`, with `weight [H, D]` and without biases; x may be a
        strided view with contiguous heads."""

    def rotary_(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        """Rotates the first R of the D elements of every head of `x [T, H, D]`, with `cos, sin [T, R / 2]`.

        Pair i is elements (i, i + R/2), or (2i, 2i + 1) where interleaved: `(a, b) -> (a cos - b sin, b cos + a sin)`.
        x may be a strided view with contiguous heads."""

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerBlocks, slots: Tensor) -> None:
        """Writes `k [T, Hkv, D]` and `v [T, Hkv, Dv]` into position `slot % 16` of block `slot // 16`, of int64 `slots [T]`, rounded to
        nearest even in the cache's dtype.

        In int8, each head of k and of v has the scale `max|x| / 127` in float32, and `x / scale` is what is rounded: 0
        where the scale is 0. A head with an element that is not finite is stored as zeros times NaN, and spoils all
        that sees it.

        k and v may be strided views with contiguous heads. Slots of one call must differ. Raises ValueError
        (`native`) for a slot outside of the cache."""

    def attention(
        self,
        q: Tensor,
        kv: LayerBlocks,
        spans: Spans,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        latent_q: Tensor | None = None,
        chunked: bool = False,
    ) -> Tensor:
        """`[T, Hq * Dv]`: `softmax(scale * q k') v` for every head of `q [T, Hq, D]`, causal within each span's own
        blocks.

        Query head h reads key/value head `h // (Hq / Hkv)`. With `window = w`, position p sees `p - w + 1 .. p`, or, where
        `chunked`, `p // w * w .. p`; blocks that no token sees may be unmapped (any number in the table). With `softcap = c`, scores become
        `c tanh(score / c)`. `sinks [Hq]` are one more score of each head, as they are, that takes weight and has no
        value. With `latent_q [T, Hq, Dv]`, values are keys as well: scores are `scale * (q k' + latent_q v')`. What lies
        at or beyond `kv_len` is never read into a result, whatever it holds. q and latent_q may be strided views with
        contiguous heads.

        Raises ValueError (`native`) for spans that do not fit q, their own lengths or the cache."""


class WeightOps(Protocol):
    """How weights are made."""

    def weight_nbytes(self, n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
        """Bytes of such a weight, padding included."""

    def empty_weight(self, n: int, k: int, layout: AnyLayout, glu: bool = False, order: Tensor | None = None) -> Weight:
        """A weight of zeros, to be filled by `pack_rows_`, or, where it is quantised, by `pack_quantized_`.

        `order` is that of all its rows (`QuantizedRows`). Raises ValueError for an odd number of gate and up rows, and
        for an order that is no permutation or that of a weight of floats."""

    def stack_nbytes(self, count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
        """Bytes of such a stack, padding included."""

    def empty_stack(self, count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> Stack:
        """A stack of `count` weights of zeros, each of them to be filled like one of `empty_weight`."""

    def pack_rows_(self, weight: Weight, source: Tensor, row: int) -> None:
        """Writes logical rows `row .. row + rows` of `weight` from `source [rows, K]` of any float dtype, rounding as
        `.to()` does.

        Disjoint rows may be written from several threads. Raises ValueError for rows or columns that the weight does
        not have, and for a quantised weight."""

    def pack_quantized_(self, weight: Weight, rows: QuantizedRows | BlockRows, row: int) -> None:
        """Writes `rows` as logical rows from `row` on.

        Disjoint rows may be written from several threads. Raises ValueError unless the weight is quantised, in their
        layout and order, and has such rows."""

    def quantize(self, rows: Tensor, format: Quantizer, name: str = "the matrix") -> QuantizedRows:
        """`rows [R, K]` of any float dtype in a format: the values of `format.quantize`, bit for bit.

        Raises ValueError that says `name` where an element is NaN or infinite."""

    def unpack(self, weight: Weight) -> Tensor:
        """The logical matrix `[N, K]` in `weight.dtype`, columns in the order of the input; of a quantised weight what
        products multiply, in float32."""


class SamplingOps(Protocol):
    """What the choice of tokens needs of rows of logits, float32 `[R, V]`."""

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 `[R]`: where each row is largest, the lowest index among equals; -1 for a row that holds NaN or +inf,
        or nothing above -inf, so that whoever chooses from it can refuse without looking at the row once more."""

    def softmax(self, logits: Tensor) -> Tensor:
        """`[R, V]`, over the last dimension."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """`[R, V]`, over the last dimension: `(x - max) - log(sum(exp(x - max)))`."""

    def top_k_top_p_(self, logits: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        """Sets to -inf all but the `top_k[r]` largest of each row, then all but the nucleus of mass `top_p[r]` among
        those.

        `k = 0` and `p >= 1` are off; `top_k` is int64 `[R]`, `top_p` float32 `[R]`. Values equal to the k-th largest
        stay. The nucleus is the words, by falling logit and then by rising index, before which less than p of the
        probability lies; the first is always in it."""

    def apply_mask_(self, logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
        """Sets to -inf what a mask does not allow. `mask` is int32 `[M, ceil(V / 32)]`: bit `i % 32` of word `i // 32` (1
        is the lowest) is set where token i is allowed; bits beyond V mean nothing.

        Mask m is for row `rows[m]` (int64 `[M]`, no row twice), or for row m of as many, where no rows are given."""

    def sample(self, logits: Tensor, draws: Draws) -> Drawn:
        """A token for each of `draws`, and log-probabilities where they are wanted.

        All that is done to a row of a step is in this call: what its mask bans is -inf; then come its edits, and its
        rules. Afterwards `logits` are as they were; nobody else may look at rows with edits meanwhile."""

    def token_logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of `tokens [M]` under rows `rows [M]`, float32 `[M]`; the `num_top` most likely tokens, int64
        `[M, num_top]`, largest first and the lower id first among equals; and theirs. -1 and -inf beyond V."""


class Ops(ForwardOps, WeightOps, SamplingOps, Protocol):
    """All of them: what a model is loaded with."""
