"""`Ops`: the contract of the operations that models are made of, for all implementations.

`pace.ops.native` (C++ kernels) and `pace.ops.reference` (plain torch) implement all of these functions.
`pace.graph.recorded` (on symbols) and `RoutedOps` of the eager runner implement `ForwardOps`.
`tests/ops/test_protocol.py` checks their names, parameters and defaults.

Shapes use T tokens, N outputs, K inputs, H heads of D elements, R rows of logits over V words. Activations are float32
in `native`; in `reference` they have the dtype of their inputs, float32 or float64. A function whose name ends in `_`
works in place. No other function modifies its arguments, except that `store_kv`, `causal_conv` and `recurrence` write
the cache. Results are new tensors.

`native` raises ValueError for a wrong shape, dtype or stride, and TypeError for an unsupported dtype. A recorded
program raises the same for ids, slots and spans, which vary from step to step, before it computes anything. `reference`
raises torch's errors, unless "Raises" says more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pace.ops.adapters import AdapterTable
from pace.ops.blocks import BlockRows
from pace.ops.draws import Drawn, Draws
from pace.ops.experts import Activation, ClampedSwiglu, Router
from pace.ops.file_table import RowTable
from pace.ops.quantizer import Quantizer
from pace.ops.weight_layout import AnyLayout, QuantizedRows

if TYPE_CHECKING:
    from pace.batch import LayerBlocks, Spans
    from pace.states import StateSlots, StateSpans


class Weight(Protocol):
    """A matrix `[n, k]` in an implementation's own storage. With `glu`, its rows are `[gate; up]`, n / 2 each."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def layout(self) -> AnyLayout:
        """The format in which it is stored."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `unpack`: the layout itself, or float32 for a quantised or mixed weight."""

    @property
    def glu(self) -> bool: ...
    @property
    def order(self) -> Tensor | None:
        """int64 `[k]`: column j of the codes multiplies column `order[j]` of the input; None for the same order."""

    @property
    def nbytes(self) -> int: ...


class Stack(Protocol):
    """One matrix for each expert of a mixture, or for each head, in an implementation's own storage. All weights are
    `[n, k]` in one layout."""

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


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Settings of a layer's `attention`. Raises ValueError for settings that contradict each other."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """With `window = w`, position p sees `p - w + 1 .. p`. None: all up to p. `Spans.newest` replaces p as the end, and
    a smaller `Spans.oldest` the beginning."""
    softcap: float | None = None
    """With `softcap = c`, scores become `c tanh(score / c)`."""
    sinks: Tensor | None = None
    """float32 `[Hq]`: one additional score per head, used unscaled, which takes weight and has no value."""
    chunked: bool = False
    """With a window w, position p sees `p // w * w .. p`. `Spans.newest` replaces p as the end."""
    causal: bool = False
    """True ignores `Spans.newest` and `Spans.oldest`: position p sees no later one, and no more than its window."""
    slopes: Tensor | None = None
    """float32 `[Hq]` (ALiBi): position p adds `slope * (j - p)` to its score of position j. Not with a softcap."""
    bf16_bias: bool = False
    """With slopes, positions add `scale * bf16(slope * bf16(j))` instead, where `bf16` rounds (Falcon)."""
    biases: Tensor | None = None
    """float32 `[Hq, 2 R + 1]`, R >= 0: position p adds `biases[h, R + d]` to its score of position j, where d is
    `j - p` limited to `-R .. R` (T5's relative positions). Not with a softcap or with slopes."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 (None is unlimited); got {self.window}")
        if self.chunked and self.window is None:
            raise ValueError("chunked attention needs a window, the length of the chunks; got None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive (None is off); got {self.softcap}")
        if self.softcap is not None and self.slopes is not None:
            raise ValueError(f"scores with slopes have no softcap; got {self.softcap}")
        if self.biases is not None and (self.softcap is not None or self.slopes is not None):
            raise ValueError("scores with biases have no softcap and no slopes")


@dataclass(frozen=True, eq=False)
class ExpertOptions:
    """Settings of a layer's `experts`."""

    activation: str | ClampedSwiglu
    gate_up_bias: Tensor | None = None
    """float32 `[E, 2 I]`, gate and up in one; `[E, I]` for experts without gates."""
    down_bias: Tensor | None = None
    """float32 `[E, H]`."""
    weigh_inputs: bool = False
    """True if weights multiply inputs, not outputs: the sum is `f1(w1 x) + f2(w2 x) + ...`."""


UNIT_EPS = 1e-6
"""Added to the sum of squares of a query or key before its root is taken, in the delta rule."""


@dataclass(frozen=True, eq=False)
class RecurrenceOptions:
    """Settings of a layer's `recurrence`. Raises ValueError for settings that contradict each other."""

    rates: Tensor
    """float32 `[H]`, at most 0: the logarithm of a decay is `rate * step`, unless there is a `lower_bound`."""
    step_bias: Tensor
    """float32 `[H * decay_dim]`, added to `steps` before softplus."""
    delta: bool
    """True for the delta rule with unit keys (gated DeltaNet), False for Mamba-2."""
    tiled: bool = False
    """Value head h reads key head `h % Hk`; False: `h // (H / Hk)`."""
    beta_scale: float = 1.0
    """Factor of `sigmoid(beta)`."""
    lower_bound: float = 0.0
    """Below 0, the logarithm of a decay is `lower_bound * sigmoid(-rate * (steps + step_bias))` instead, only for the
    delta rule."""
    skip: Tensor | None = None
    """float32 `[H]`: `skip * v` is added to the result."""
    step_limits: tuple[float, float] = (0.0, math.inf)
    """Range to which steps are clamped, after softplus."""

    def __post_init__(self) -> None:
        low, high = self.step_limits
        if not 0 <= low <= high:
            raise ValueError(f"step_limits must be 0 <= low <= high; got {self.step_limits}")
        if not self.lower_bound <= 0 or (self.lower_bound and not self.delta):
            raise ValueError(f"lower_bound must be at most 0, and 0 without the delta rule; got {self.lower_bound}")
        if not self.beta_scale > 0:
            raise ValueError(f"beta_scale must be positive; got {self.beta_scale}")


class ForwardOps(Protocol):
    """Operations of a model's forward pass.

    A row of a result depends only on the same row of the arguments (or the same token's span). It does not depend on
    the number of rows, other rows, or threads."""

    def embedding(self, ids: Tensor, weight: Weight | RowTable) -> Tensor:
        """Returns `[T, K]`: row `ids[t]` of the weight for int64 `ids [T]`, widened to float32.

        Raises ValueError for an id outside of the weight, TypeError (`native`) for ids of another dtype."""

    def given_rows(self, rows: Tensor) -> Tensor:
        """Returns a copy of `rows [T, W]`, columns of `GivenRows.rows`. The first operation of a tower, all of whose
        rows are given; rows may have any row stride."""

    def place_rows_(self, x: Tensor, rows: Tensor, at: Tensor, add: bool) -> None:
        """Replaces rows `at` of `x [T, W]` by `rows [G, W]`, columns of `GivenRows.rows`, or adds them with `add`.
        int64 `at [G]` ascends. x and rows may have any row stride.

        Raises ValueError (`native`) for an index outside of x, and if `at` does not ascend."""

    def concatenate(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns `[T, A + B]`: the columns of `a [T, A]`, then those of `b [T, B]`. Both may have any row stride."""

    def pool(self, x: Tensor, starts: Tensor, pooling: str) -> Tensor:
        """Returns `[S, K]`: one row for each text s, made of rows `starts[s] .. starts[s + 1]` of `x [T, K]`, for int32
        `starts [S + 1]` that ascend from 0 to T.

        `pooling` is one of `POOLINGS`. "cls" is the first of the n rows of a text, "lasttoken" the last. "max" is the
        largest value of each column. "mean_sqrt_len_tokens" is the sum divided by `sqrt(n)`. "weightedmean" is the mean
        with weights 1 to n. Sums are float32, in order. x may have any row stride.

        Raises ValueError for an unknown pooling and (`native`) for a text without rows."""

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Returns `[T, N]`: `residual [T, N] + activation(x [T, K] W' + bias [N])`; bias, activation and residual are
        optional.

        A layout with `token_inputs` rounds x: factor[t] = 1 / max(max|x[t]|, 1e-5) * 127, code = round(x * factor).
        Then x W' is the exact sum over k of level[n, k] * code[t, k], times (scale[n] * (1 / factor[t])).

        A weight with `glu` gives its gate and up, side by side. x may have any row stride; the residual must be
        contiguous. Raises ValueError (`native`) for an unknown activation."""

    def linear_glu(self, x: Tensor, weight: Weight, activation: str, bias: Tensor | None = None) -> Tensor:
        """Returns `[T, N / 2]`: `activation(x Wg' + bg) * (x Wu' + bu)`. The rows of the weight (and of `bias [N]`) are
        `[gate; up]`.

        x may have any row stride. The weight must be made with `glu`."""

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Applies an activation to every element of x: silu, gelu, gelu_new, gelu_tanh, gelu_fast, quick_gelu, relu,
        relu2, tanh, a Clamp or a Xielu. gelu_new, gelu_tanh and gelu_fast are the same function."""

    def glu(self, x: Tensor, activation: str) -> Tensor:
        """Returns `[T, K]`: `activation(gate) * up` for rows `[gate | up]` of `x [T, 2 K]`. With `linear` before it, it
        gives the bits of `linear_glu`. x may have any row stride."""

    def add_adapters_(self, y: Tensor, x: Tensor, adapters: AdapterTable, routing: Tensor) -> None:
        """Adds LoRA adapters to a product `y [T, N]` of `x [T, K]`, in the order of each row's routing.

        `routing [T, 2 k]` has the slots of up to k adapters of each row, -1 for none, then their weights. With weight
        w, part p of the columns becomes `y + (w * scale) * (B_p t_p + bias_p)`, where `t = A x`. A slot that is empty
        adds nothing, and a row without adapters keeps its bits. x and y may have any row stride.

        Raises ValueError (`native`) for adapters of a product of another shape."""

    def scale_(self, x: Tensor, factor: float | Tensor) -> None:
        """Multiplies `x [T, K]` by a finite number, rounded to float32, or column k by element k of `factor [K]`. x may
        have any row stride."""

    def softcap_(self, x: Tensor, cap: float) -> None:
        """Replaces `x [T, K]` by `cap * tanh(x / cap)`, between -cap and cap, for a positive cap; NaN stays NaN. x may
        have any row stride."""

    def gate_(self, x: Tensor, gate: Tensor, activation: str | None = "sigmoid") -> None:
        """Multiplies `x [T, K]` by `activation(gate)` of `gate [T, G]`, where G divides K: column k by that of gate
        column `k // (K / G)`. Both may have any row stride. The activation is sigmoid, silu, softplus or None."""

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, activation: str, norm_first: bool
    ) -> Tensor:
        """Returns `[T, K]`: `rms_norm(x) * a(gate)` with `norm_first`, else `rms_norm(x * a(gate))`, for `x, gate
        [T, K]` and an activation as in `gate_`.

        The norm is that of each of `groups` equal parts of a row. The weight has K elements, or those of one part.
        Rows may have any stride."""

    def route(
        self, logits: Tensor, router: Router, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
    ) -> Tensor:
        """Returns `[T, 2 top_k]`: the indices of the experts that each row of `logits [T, E]` chooses, ascending, then
        their weights. `choice_bias [E]` is added to the scores for the choice only. `expert_scale [E]` multiplies the
        weights at the end. logits may have any row stride.

        A row whose scores contain NaN chooses the first experts, with NaN as weights."""

    def experts(
        self,
        x: Tensor,
        gate_up: Stack,
        down: Stack,
        routing: Tensor,
        options: ExpertOptions,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Returns `[T, H]`: `residual + w1 f1(x) + w2 f2(x) + ...` for `x [T, K]`, added in this order; without a
        residual, the sum starts at 0.

        The experts e and weights w of a row are those of `routing [T, 2 top_k]`, the result of `route`.
        `fe(x) = h We' + be`, `h = activation(x Wg' + bg) * (x Wu' + bu)`, or a ClampedSwiglu of the two. `gate_up` has
        rows `[gate; up]`, made with `glu`. Made without, it has rows of up, and `h = activation(x Wu' + bu)`. x may
        have any row stride; the residual must be contiguous. An expert that no row chooses is not read.

        Raises ValueError (`native`) for stacks of inconsistent shapes, and for an invalid routing."""

    def heads_linear(self, x: Tensor, weights: Stack) -> Tensor:
        """Returns `[T, H * N]`: `x[:, h] W_h'` for every head h of `x [T, H, K]`, with one weight `[N, K]` per head. x
        may be a strided view with contiguous heads. The weights must be without `glu`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `[T, K]`: `x / sqrt(mean(x^2) + eps) * weight [K]`; x may have any row stride."""

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Returns `[T, K]`: `(x - mean(x)) / sqrt(var(x) + eps) * weight [K] + bias [K]`, population variance; x may
        have any row stride."""

    def head_rms_norm_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Replaces every head of `x [T, H, D]` by its `rms_norm` with one `weight [D]`. x may be a strided view with
        contiguous heads."""

    def head_layer_norm_(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """Replaces every head of `x [T, H, D]` by its `layer_norm`, with `weight [H, D]`, or `[D]` for all heads, and
        `bias [D]`. x may be a strided view with contiguous heads."""

    def rotary_(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        """Rotates the first R of the D elements of every head of `x [T, H, D]`, with `cos, sin [T, R / 2]`.

        Pair i is elements (i, i + R/2), or (2i, 2i + 1) if interleaved: `(a, b) -> (a cos - b sin, b cos + a sin)`. x
        may be a strided view with contiguous heads."""

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerBlocks, slots: Tensor) -> None:
        """Writes `k [T, Hkv, D]` and `v [T, Hkv, Dv]` into the cache, rounded to nearest even in the cache's dtype.
        int64 `slots [T]` are the positions: `slot % 16` of block `slot // 16`.

        In int8, each head of k and of v has the float32 scale `max|x| / 127`. `x / scale` is rounded; it is 0 if the
        scale is 0. A head with a non-finite element is stored as zeros with scale NaN, so that every result that reads
        it becomes NaN.

        k and v may be strided views with contiguous heads. Slots of one call must differ. Raises ValueError (`native`)
        for a slot outside of the cache."""

    def attention(
        self,
        q: Tensor,
        kv: LayerBlocks,
        spans: Spans,
        options: AttentionOptions,
        latent_q: Tensor | None = None,
    ) -> Tensor:
        """Returns `[T, Hq * Dv]`: `softmax(scale * q k') v` for every head of `q [T, Hq, D]`, over positions of its own
        span's blocks.

        Query head h reads key/value head `h // (Hq / Hkv)`. A token sees the positions up to its own or, with
        `spans.newest`, up to `newest[t]`, which is included. `options` limit the oldest position, unless `spans.oldest`
        is less. Blocks before the oldest position of all tokens may be unmapped (any number in the table). With
        `latent_q [T, Hq, Dv]`, values are also keys: scores are `scale * (q k' + latent_q v')`. Positions at or beyond
        `kv_len` never affect a result, even if they hold NaN. q and latent_q may be strided views with contiguous
        heads.

        Raises ValueError (`native`) for spans that do not fit q, their own lengths or the cache. The same holds for a
        newest position before the token's oldest, and for one of the two that is not a position below `kv_len`."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        slots: StateSlots,
        spans: StateSpans,
    ) -> Tensor:
        """Returns `[T, C]`: `activation(bias + w[0] x(t - L + 1) + ... + w[L - 1] x(t))` for each channel of `x [T, C]`
        and `weight [C, L]`, summed in this order.

        The inputs before a span are those of its slot. It reads and writes slots as `StateSpans` says. The activation
        is silu or None. x may have any row stride. A row depends only on its span's slot and the span's tokens up to
        its own, however they are split over steps.

        Raises ValueError (`native`) for spans that do not fit x, the slots or their journal."""

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        steps: Tensor,
        beta: Tensor | None,
        slots: StateSlots,
        spans: StateSpans,
        options: RecurrenceOptions,
    ) -> Tensor:
        """Returns `[T, H * Dv]`, computed token by token, in float32, for each head of `v [T, H, Dv]` and its matrix
        `S [Dk, Dv]`: `S <- decay * S + k d'`, then `S' q + skip * v`.

        `steps [T, H * decay_dim]` become `step = softplus(steps + step_bias)`, and `decay = exp(rate * step)`.
        `q, k [T, Hk, Dk]` belong to `H / Hk` value heads each. With `delta`, q and k are divided by their length
        `sqrt(sum(x^2) + UNIT_EPS)`, q also by `sqrt(Dk)`, and `d = beta_scale * sigmoid(beta) * (v - (decay * S)' k)`
        with `beta [T, H]`. Without, `d = step * v`, and beta is None.

        It reads and writes slots as `StateSpans` says. All arguments may be strided views with contiguous heads. A row
        depends only on its span's slot and the span's tokens up to its own, however they are split over steps.

        Raises ValueError (`native`) for spans that do not fit v, the slots or their journal."""


class WeightOps(Protocol):
    """Operations that make weights."""

    def weight_nbytes(self, n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
        """Bytes of a weight, padding included."""

    def empty_weight(self, n: int, k: int, layout: AnyLayout, glu: bool = False, order: Tensor | None = None) -> Weight:
        """Returns a weight of zeros, to be filled by `pack_rows_`, or by `pack_quantized_` if it is quantised.

        `order` is the column order of all its rows (`QuantizedRows`). Raises ValueError for an odd number of gate and
        up rows, an order that is no permutation, and an order of a float weight."""

    def stack_nbytes(self, count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> int:
        """Bytes of a stack, padding included."""

    def empty_stack(self, count: int, n: int, k: int, layout: AnyLayout, glu: bool = False) -> Stack:
        """Returns a stack of `count` weights of zeros, each to be filled like one of `empty_weight`."""

    def pack_matrices(self, matrices: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Weight]:
        """Returns weights of a float dtype with the elements of matrices `[n, k]` of any float dtype. They share one
        block of memory, which is freed with the last of them."""

    def pack_rows_(self, weight: Weight, source: Tensor, row: int) -> None:
        """Writes logical rows `row .. row + rows` of `weight` from `source [rows, K]` of any float dtype, rounding like
        `.to()`.

        Disjoint rows may be written from several threads. Raises ValueError for rows or columns that the weight does
        not have, and for a quantised weight."""

    def pack_quantized_(self, weight: Weight, rows: QuantizedRows | BlockRows, row: int) -> None:
        """Writes `rows` into the weight, from logical row `row` on.

        Disjoint rows may be written from several threads. Raises ValueError unless the weight is quantised, has the
        layout and order of `rows`, and has these rows."""

    def quantize(self, rows: Tensor, format: Quantizer, name: str = "the matrix") -> QuantizedRows:
        """Quantises `rows [R, K]` of any float dtype: the values of `format.quantize`, bit for bit.

        Raises a ValueError that contains `name` if an element is NaN or infinite."""

    def unpack(self, weight: Weight) -> Tensor:
        """Returns the logical matrix `[N, K]` in `weight.dtype`, columns in the order of the input. For a quantised
        weight these are the values used in products, in float32."""


class SamplingOps(Protocol):
    """Operations of sampling on rows of logits, float32 `[R, V]`."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Returns int64 `[R]`: the index of the largest logit of each row, the lowest among equals. -1 for a row that
        holds NaN or +inf, or nothing above -inf, so that the caller can reject it without another pass."""

    def apply_mask_(self, logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
        """Sets to -inf the logits that a mask does not allow. `mask` is int32 `[M, ceil(V / 32)]`: bit `i % 32` of word
        `i // 32` (1 is the lowest) is set if token i is allowed; bits beyond V are ignored.

        Mask m is for row `rows[m]` (int64 `[M]`, no row twice). Without `rows`, M is R and mask m is for row m."""

    def sample(self, logits: Tensor, draws: Draws) -> Drawn:
        """Draws a token for each of `draws`, and returns log-probabilities where requested.

        One call does all the work on a row: the mask, then the edits, then the rules. `logits` are unchanged
        afterwards; no other thread may read rows with edits during the call."""

    def token_logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the log-probabilities of `tokens [M]` under rows `rows [M]`, float32 `[M]`. Also the `num_top` most
        likely tokens, int64 `[M, num_top]`, largest first and the lower id first among equals, and their
        log-probabilities. -1 and -inf beyond V."""


class Ops(ForwardOps, WeightOps, SamplingOps, Protocol):
    """All operations that loading and running a model needs."""
