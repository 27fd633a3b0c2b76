"""Latent attention (DeepSeek-V2): the cache has one latent vector and one rotated key per position, for all heads.

For a position with latent c and rotated key r, head h has the key `[Wk_h c | r]` and the value `Wv_h c`. Decode and
prefill compute attention without materialising them, so that a row has the same bits in both:

    q_h' [Wk_h c | r] = (Wk_h' q_h)' c + q_h' r        sum_j w_j Wv_h c_j = Wv_h sum_j w_j c_j
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from pace.batch import ForwardBatch, KVBlocks, Latent
from pace.llm.layers.base import Layer
from pace.llm.layers.experts import ExpertLinear, Form
from pace.llm.layers.linear import Linear
from pace.llm.layers.norm import HeadNorm, RMSNorm
from pace.llm.layers.rotary import Angles, NoRotary, Rotary, Temperature
from pace.llm.layers.weight_target import Piece, RowRange, TensorSource, WeightTarget
from pace.ops.protocol import AttentionOptions, ForwardOps


class LatentAttention(Layer):
    """Latent attention: `residual + output(values)`, causal within each span.

    `down` returns three parts in its columns: the queries of all heads, the latent before `latent_norm`, and the key
    before its rotation. With `query_up`, the first part is its input before `query_norm` instead. A query head has
    `nope_dim` elements for the latent, which `keys_up` maps to `cache.rank`, then `cache.rope_dim` that are rotated.
    `add_gate` adds a fourth part."""

    gate_rows = 0
    """Width of the gate of the values."""
    gate = "sigmoid"
    """Its activation."""

    def __init__(
        self,
        down: Linear,
        query_norm: RMSNorm | None,
        query_up: Linear | None,
        latent_norm: HeadNorm,
        keys_up: ExpertLinear,
        values_up: ExpertLinear,
        output: Linear,
        nope_dim: int,
        cache: Latent,
        rotary: Rotary | NoRotary,
        scale: float,
    ):
        self.down = down
        self.query_norm = query_norm
        self.query_up = query_up
        self.latent_norm = latent_norm
        self.keys_up = keys_up
        self.values_up = values_up
        self.output = output
        self.num_heads = keys_up.count
        self.nope_dim = nope_dim
        self.cache = cache
        self.rotary = rotary
        self.scale = scale
        self.temperature: Temperature | NoRotary = NoRotary()
        """Multiplies queries."""

    def add_gate(self, name: str, num_rows: int, activation: str) -> None:
        """Adds a gate of the values, as `Attention.add_gate` does."""
        self.down = self.down.with_part(name, num_rows)
        self.gate_rows, self.gate = num_rows, activation

    @property
    def readers(self) -> list[Linear]:
        return [self.down]

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: KVBlocks,
        residual: Tensor | None = None,
    ) -> Tensor:
        q, latent, key, gate = self._heads(ops, self.down(ops, x))
        self.temperature.rotate_(ops, q, angles)
        latent_q = ops.heads_linear(q[:, :, : self.nope_dim], self.keys_up.stack)
        q = q[:, :, self.nope_dim :]
        self.latent_norm(ops, latent)
        self.rotary.rotate_(ops, q, angles)
        self.rotary.rotate_(ops, key, angles)
        ops.store_kv(key, latent, kv, batch.slots)
        heads = (self.num_heads, self.cache.rank)
        context = ops.attention(q, kv, batch.spans, AttentionOptions(self.scale), latent_q.unflatten(1, heads))
        values = ops.heads_linear(context.unflatten(1, heads), self.values_up.stack)
        if self.gate_rows:
            ops.gate_(values, gate, self.gate)
        return self.output(ops, values, residual=residual)

    def _heads(self, ops: ForwardOps, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries `[T, heads, nope_dim + rope_dim]`, latent `[T, 1, rank]`, the key `[T, 1, rope_dim]` and the
        gate `[T, gate_rows]`."""
        rank, rope_dim = self.cache.rank, self.cache.rope_dim
        gates = self.down.n - self.gate_rows
        keys = gates - rope_dim
        q, latent, key, gate = x[:, : keys - rank], x[:, keys - rank : keys], x[:, keys:gates], x[:, gates:]
        if self.query_up is not None:
            q = self.query_up(ops, self.query_norm(ops, q))
        q = q.unflatten(1, (self.num_heads, self.nope_dim + rope_dim))
        return q, latent.unflatten(1, (1, rank)), key.unflatten(1, (1, rope_dim)), gate


# -- weights that expand latents to keys and values: kv_b_proj [heads * (nope_dim + value_dim), rank]. Each head has the
# rows of the key, then those of the value. In newer GGUF files, k_b_proj [heads, rank, nope_dim] and v_b_proj [heads,
# value_dim, rank].


class TurnedLinear(Linear):
    """`W [n, k]` whose transpose is in the checkpoint: k rows of `source`, which is `[.., n]`. Stored as floats, or
    quantised by a QuantizationConfig."""

    takes_codes = False

    def __init__(self, part: str, n: int, source: TensorSource):
        super().__init__({part: n}, source.num_rows)
        self.source = source
        self._lock = Lock()
        self._columns: Tensor | None = None
        """float32 `[k, n]`, until all columns are read."""
        self._missing = self.k

    def targets(self) -> dict[str, list[WeightTarget]]:
        return {self.source.tensor: self.source.targets(self._take_columns, 0)}

    def tensor(self, part: str) -> str:
        return self.source.tensor

    def _take_columns(self, piece: Piece, start: int) -> None:
        columns = piece if isinstance(piece, Tensor) else piece.dequantize()
        with self._lock:
            if self._columns is None:
                self._columns = torch.empty(self.k, self.n, dtype=torch.promote_types(columns.dtype, torch.float32))
            self._columns[start : start + len(columns)] = columns
            self._missing -= len(columns)
            if self._missing:
                return
            matrix, self._columns = self._columns.T.contiguous(), None
        [part] = self.parts
        self._fill(matrix, part, 0)


class KeysUp(ExpertLinear):
    """`Wk_h' [rank, nope_dim]` of every head."""

    def in_form(self, form: Form) -> list[Linear]:
        if form is not self.forms[0]:
            return super().in_form(form)
        return [TurnedLinear(part, self.rank, source) for h in range(self.count) for part, source in form(h).items()]

    def __init__(self, rank: int, count: int, k: int, *forms: Form):
        self.rank = rank
        super().__init__(count, k, *forms)


def head_projections(name: str, heads: int, rank: int, nope_dim: int, value_dim: int) -> tuple[KeysUp, ExpertLinear]:
    """`keys_up` and `values_up` of a LatentAttention, from kv_b_proj, or from k_b_proj and v_b_proj, below `name`."""
    both = nope_dim + value_dim

    def of_both(first: int, rows: int) -> Form:
        tensor = f"{name}.kv_b_proj"
        return lambda h: {
            tensor: TensorSource((heads * both, rank), (RowRange(h * both + first, rows),), f"{tensor}.weight")
        }

    def of_one(tensor: str, rows: int, k: int) -> Form:
        return lambda h: {
            f"{name}.{tensor}": TensorSource((heads, rows, k), (RowRange(h * rows, rows),), f"{name}.{tensor}.weight")
        }

    return (
        KeysUp(rank, heads, nope_dim, of_both(0, nope_dim), of_one("k_b_proj", rank, nope_dim)),
        ExpertLinear(heads, rank, of_both(nope_dim, value_dim), of_one("v_b_proj", value_dim, rank)),
    )
