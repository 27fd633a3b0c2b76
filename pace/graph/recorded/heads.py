"""Heads and attention on symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Heads, Instruction, Places, Value
from pace.graph.symbols import HeadRows, LayerKv, Rows, Slots, Spans, SymbolicAngles
from pace.ops.checks import check_vector
from pace.ops.kernels import attention as attention_kernels
from pace.ops.kernels.norm import NormParameters, head_layer_norm_parameters
from pace.ops.protocol import AttentionOptions


@dataclass(eq=False)
class NormHeads(Instruction):
    """Normalises each head of `heads` in place."""

    operations = ("head_rms_norm_", "head_layer_norm_")
    operator = "norm"
    changed = "heads"
    heads: Heads
    parameters: NormParameters

    def lower(self, program: _C.Program, places: Places) -> None:
        program.norm_heads(places.heads(self.heads), self.parameters)


def head_rms_norm_(x: HeadRows, weight: Tensor, eps: float) -> None:
    check_vector("weight", weight, x.heads.head_dim)
    x.recording.append(NormHeads(x.heads, NormParameters("rms", weight, None, eps)))


def head_layer_norm_(x: HeadRows, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    parameters = head_layer_norm_parameters(x.heads.count, x.heads.head_dim, weight, bias, eps)
    x.recording.append(NormHeads(x.heads, parameters))


@dataclass(frozen=True)
class Rotation:
    """Parameters of a rotation: it rotates `half` pairs of each head by table `table` of the step's angles."""

    table: int
    half: int
    interleaved: bool


@dataclass(eq=False)
class RotateHeads(Instruction):
    """Rotates each head of `heads` in place."""

    operations = ("rotary_",)
    operator = "rotary"
    changed = "heads"
    heads: Heads
    rotation: Rotation

    def lower(self, program: _C.Program, places: Places) -> None:
        program.rotate_heads(places.heads(self.heads), self.rotation)


def rotary_(x: HeadRows, cos: SymbolicAngles, sin: SymbolicAngles, interleaved: bool) -> None:
    if 2 * cos.half > x.heads.head_dim:
        raise ValueError(f"cos and sin rotate {2 * cos.half} elements of a head, but x has heads of {x.heads.head_dim}")
    x.recording.append(RotateHeads(x.heads, Rotation(cos.table, cos.half, interleaved)))


@dataclass(eq=False)
class StoreKv(Instruction):
    """Writes the keys and values of the step's tokens into the cache of a layer."""

    operations = ("store_kv",)
    operator = "attention"
    k: Heads
    v: Heads
    layer: int

    def lower(self, program: _C.Program, places: Places) -> None:
        program.store_kv(places.heads(self.k), places.heads(self.v), self.layer)


def store_kv(k: HeadRows, v: HeadRows, kv: LayerKv, slots: Slots) -> None:
    for name, heads, dim in (("k", k.heads, kv.key_dim), ("v", v.heads, kv.value_dim)):
        if heads.head_dim != dim:
            raise ValueError(f"{name} has heads of {heads.head_dim}, the cache of the layer has heads of {dim}")
    k.recording.append(StoreKv(k.heads, v.heads, kv.number))


@dataclass(frozen=True)
class Preparation:
    """Steps merged into attention: normalises and rotates queries and keys, normalises values (each optional), and
    stores keys and values. Without keys and values, only queries are prepared."""

    k: Heads | None
    v: Heads | None
    query_norm: NormParameters | None = None
    key_norm: NormParameters | None = None
    rotation: Rotation | None = None
    norm_last: bool = False
    """True rotates queries and keys before it normalises them."""
    value_norm: NormParameters | None = None

    def lower(self, places: Places) -> _C.Preparation:
        return _C.Preparation(
            self.k and places.heads(self.k),
            self.v and places.heads(self.v),
            self.query_norm,
            self.key_norm,
            self.value_norm,
            self.rotation,
            self.norm_last,
        )

    def operators(self) -> Iterator[str]:
        if self.k:
            yield "attention"  # stores keys and values
        yield from ["norm" for norm in (self.query_norm, self.key_norm, self.value_norm) if norm]
        yield from ["rotary"] * (2 if self.k else 1) if self.rotation else []


@dataclass(eq=False)
class Attention(Instruction):
    """out = softmax(scale * q k') v over the cache of a layer, after `preparation`. With `latent_q`, which preparation
    does not change, values are also keys."""

    operations = ("attention",)
    operator = "attention"
    out: Value
    q: Heads
    layer: int
    options: AttentionOptions
    latent_q: Heads | None = None
    preparation: Preparation | None = None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.attention(
            places.value(self.out),
            places.heads(self.q),
            self.latent_q and places.heads(self.latent_q),
            self.preparation and self.preparation.lower(places),
            self.layer,
            self.options,
        )

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "attention"
        if self.preparation:
            yield from self.preparation.operators()

    def reads(self) -> Iterator[Columns | Heads]:
        yield self.q
        if self.latent_q:
            yield self.latent_q
        if self.preparation and self.preparation.k:
            yield from (self.preparation.k, self.preparation.v)


def attention(
    q: HeadRows, kv: LayerKv, spans: Spans, options: AttentionOptions, latent_q: HeadRows | None = None
) -> Rows:
    out = Value(q.heads.count * kv.value_dim)
    attention_kernels.check_vectors_of_heads(options, q.heads.count)
    of_latents = latent_q and latent_q.heads
    if of_latents and (of_latents.count, of_latents.head_dim) != (q.heads.count, kv.value_dim):
        raise ValueError(
            f"latent_q must be [T, {q.heads.count}, {kv.value_dim}] for this cache; got {of_latents.count} heads of "
            f"{of_latents.head_dim}"
        )
    return q.recording.rows(Attention(out, q.heads, kv.number, options, of_latents))
