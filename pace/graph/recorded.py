"""The functions of `pace.ops` in a forward pass, on symbols: each appends an instruction, which describes the operation
to a program.

A model's code calls these in place of `pace.ops.native`. All that `pace.graph` knows about an operation is here. The
class of its instruction lists the functions that record it, and its operator. It also defines how it is lowered to
csrc/program.cpp. The functions follow the class. `pace/ops/protocol.py` has their contracts. Operations on states are
in `pace.graph.recorded_states`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Heads, Instruction, Places, Value
from pace.graph.recorded_states import causal_conv, gate_, gated_norm, recurrence  # noqa: F401
from pace.graph.symbols import (
    GivenColumns,
    GivenPlaces,
    HeadRows,
    Ids,
    LayerKv,
    Routing,
    Rows,
    Slots,
    Spans,
    SpanStarts,
    SymbolicAngles,
)
from pace.ops.adapters import AdapterTable
from pace.ops.checks import check_head_weights, check_pooling, check_vector
from pace.ops.experts import Activation as ActivationFunction
from pace.ops.experts import Router
from pace.ops.file_table import FileTable
from pace.ops.kernels import adapters as adapter_kernels
from pace.ops.kernels import attention as attention_kernels
from pace.ops.kernels import experts as expert_kernels
from pace.ops.kernels.norm import NormParameters
from pace.ops.protocol import AttentionOptions, ExpertOptions
from pace.ops.weight import PackedWeight

# -- rows of a table


@dataclass(eq=False)
class Embedding(Instruction):
    """out = rows `ids + offset` of the weight; `ids` are the step's "tokens", "positions" or "types"."""

    operations = ("embedding",)
    operator = "embedding"
    out: Value
    weight: PackedWeight
    ids: str
    offset: int

    def lower(self, program: _C.Program, places: Places) -> None:
        program.embedding(places.value(self.out), self.weight, self.ids, self.offset)


@dataclass(eq=False)
class ReadRows(Instruction):
    """out = rows of a table in a file. They are read before the step, and are input `number` of the program."""

    out: Value
    table: FileTable
    number: int

    def lower(self, program: _C.Program, places: Places) -> None:
        program.input_rows(places.value(self.out), self.number)

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "embedding"


def embedding(ids: Ids, weight: PackedWeight | FileTable) -> Rows:
    recording = ids.recording
    if not isinstance(weight, FileTable):
        return recording.rows(Embedding(Value(weight.k), weight, ids.kind, ids.offset))
    if ids.kind != "tokens" or ids.offset:
        raise NotImplementedError("a recorded table in a file is indexed by the step's tokens")
    number = sum(isinstance(instruction, ReadRows) for instruction in recording.instructions)
    return recording.rows(ReadRows(Value(weight.k), weight, number))


# -- given rows


@dataclass(eq=False)
class Given(Instruction):
    """out = columns `first ..` of the step's given rows, one for each token."""

    operations = ("given_rows",)
    operator = "embedding"
    out: Value
    first: int

    def lower(self, program: _C.Program, places: Places) -> None:
        program.given_rows(places.value(self.out), self.first)


def given_rows(rows: GivenColumns) -> Rows:
    return rows.recording.rows(Given(Value(rows.count), rows.first))


@dataclass(eq=False)
class PlaceRows(Instruction):
    """Some rows of x become columns `first ..` of the step's given rows, or with `add` the sum of both."""

    operations = ("place_rows_",)
    operator = "embedding"
    changed = "x"
    x: Columns
    first: int
    add: bool

    def lower(self, program: _C.Program, places: Places) -> None:
        program.place_rows(places.columns(self.x), self.first, self.add)


def place_rows_(x: Rows, rows: GivenColumns, at: GivenPlaces, add: bool) -> None:
    if rows.count != x.columns.count:
        raise ValueError(f"rows must be float32 [G, {x.columns.count}], as wide as x; got {rows.count} columns")
    x.recording.append(PlaceRows(x.columns, rows.first, add))


# -- rows of texts


@dataclass(eq=False)
class Pool(Instruction):
    """out = one row for each span of the step. The step must have one logit row for each span."""

    operations = ("pool",)
    operator = "norm"
    out: Value
    x: Columns
    pooling: str

    def lower(self, program: _C.Program, places: Places) -> None:
        program.pool(places.value(self.out), places.columns(self.x), self.pooling)


def pool(x: Rows, starts: SpanStarts, pooling: str) -> Rows:
    check_pooling(pooling)
    return x.recording.rows(Pool(Value(x.columns.count, per_token=False), x.columns, pooling))


# -- norms


@dataclass(eq=False)
class Norm(Instruction):
    """out = norm(x), or with a residual, factor * (residual + norm(x))."""

    operations = ("rms_norm", "layer_norm")
    operator = "norm"
    out: Value
    x: Columns
    parameters: NormParameters
    residual: Columns | None = None
    factor: float = 1.0

    def lower(self, program: _C.Program, places: Places) -> None:
        residual = self.residual and places.columns(self.residual)
        program.norm(places.value(self.out), places.columns(self.x), self.parameters, residual, self.factor)

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "norm"
        if self.factor != 1.0:
            yield "norm"


def rms_norm(x: Rows, weight: Tensor, eps: float) -> Rows:
    check_vector("weight", weight, x.columns.count)
    return x.recording.rows(Norm(x.like(), x.columns, NormParameters("rms", weight, None, eps)))


def layer_norm(x: Rows, weight: Tensor | None, bias: Tensor | None, eps: float) -> Rows:
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_vector(name, vector, x.columns.count)
    return x.recording.rows(Norm(x.like(), x.columns, NormParameters("layer", weight, bias, eps)))


# -- products


@dataclass(eq=False)
class Linear(Instruction):
    """out = residual + activation(norm(x) W' + bias); with a glu weight, act(gate) * up, or both `apart`. The residual
    must be a whole value."""

    operations = ("linear", "linear_glu")
    out: Value
    x: Columns
    weight: PackedWeight
    bias: Tensor | None
    activation: ActivationFunction | None
    residual: Columns | None
    norm: NormParameters | None = None
    apart: bool = False

    def lower(self, program: _C.Program, places: Places) -> None:
        program.linear(
            places.value(self.out),
            places.columns(self.x),
            self.norm,
            self.weight,
            self.bias,
            self.activation,
            self.residual and places.value(self.residual.value),
            self.apart,
        )

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield of_weight[id(self.weight)]
        if self.norm:
            yield "norm"


def linear(
    x: Rows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: ActivationFunction | None = None,
    residual: Rows | None = None,
) -> Rows:
    added = residual and residual.columns
    if added and added.count != weight.n:
        raise ValueError(f"residual must be float32 [T, {weight.n}]; got {added.count} columns")
    if added and not added.is_whole:
        raise NotImplementedError("the residual of a recorded product is a whole matrix; add columns of one by +")
    return _product(x, weight, bias, activation, added, weight.glu)


def linear_glu(x: Rows, weight: PackedWeight, activation: str, bias: Tensor | None = None) -> Rows:
    return _product(x, weight, bias, activation, None, False)


def _product(
    x: Rows,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: ActivationFunction | None,
    residual: Columns | None,
    apart: bool,
) -> Rows:
    if x.columns.count != weight.k:
        raise ValueError(f"x must be float32 [T, {weight.k}]; got {x.columns.count} columns")
    out = x.like(weight.n if apart else weight.n_out)
    return x.recording.rows(Linear(out, x.columns, weight, bias, activation, residual, apart=apart))


@dataclass(eq=False)
class AddAdapters(Instruction):
    """y += the adapters that each row is routed to, of norm(x); in place."""

    operations = ("add_adapters_",)
    operator = "projection"
    changed = "y"
    y: Columns
    x: Columns
    adapters: AdapterTable
    norm: NormParameters | None = None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.add_adapters(places.columns(self.y), places.columns(self.x), self.norm, self.adapters)

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "projection"
        if self.norm:
            yield "norm"


def add_adapters_(y: Rows, x: Rows, adapters: AdapterTable, routing: Routing) -> None:
    adapter_kernels.check_adapters(adapters, y.columns.count, x.columns.count)
    y.recording.append(AddAdapters(y.columns, x.columns, adapters))


# -- mixtures of experts


@dataclass(eq=False)
class Route(Instruction):
    """out `[T, 2 top_k]` = the routing of each row of logits."""

    operations = ("route",)
    operator = "mlp"
    out: Value
    logits: Columns
    router: Router
    choice_bias: Tensor | None
    expert_scale: Tensor | None

    def lower(self, program: _C.Program, places: Places) -> None:
        vectors = self.choice_bias, self.expert_scale
        program.route(places.value(self.out), places.columns(self.logits), self.router, *vectors)


def route(logits: Rows, router: Router, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None) -> Rows:
    if logits.columns.count != router.num_experts:
        raise ValueError(f"logits must be float32 [T, {router.num_experts}]; got {logits.columns.count} columns")
    expert_kernels.check_router_vectors(router, choice_bias, expert_scale)
    out = logits.like(2 * router.top_k)
    return logits.recording.rows(Route(out, logits.columns, router, choice_bias, expert_scale))


@dataclass(eq=False)
class Experts(Instruction):
    """out = residual + the chosen experts of norm(x). `choices` is a routing, or with `router`, the logits from which
    it is computed. Choices and residual must be whole values."""

    operations = ("experts",)
    operator = "mlp"
    out: Value
    x: Columns
    gate_up: expert_kernels.ExpertStack
    down: expert_kernels.ExpertStack
    choices: Columns
    options: ExpertOptions
    residual: Columns | None
    norm: NormParameters | None = None
    router: Router | None = None
    choice_bias: Tensor | None = None
    expert_scale: Tensor | None = None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.experts(
            places.value(self.out),
            places.columns(self.x),
            self.norm,
            places.value(self.choices.value),
            self.router,
            self.choice_bias,
            self.expert_scale,
            len(self.gate_up),
            self.gate_up,
            self.down,
            self.options,
            self.residual and places.value(self.residual.value),
        )

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "mlp"
        if self.router:
            yield "mlp"
        if self.norm:
            yield "norm"


def experts(
    x: Rows,
    gate_up: expert_kernels.ExpertStack,
    down: expert_kernels.ExpertStack,
    routing: Rows,
    options: ExpertOptions,
    residual: Rows | None = None,
) -> Rows:
    expert_kernels.check_stacks(gate_up, down, options)
    if x.columns.count != gate_up.k:
        raise ValueError(f"x must be float32 [T, {gate_up.k}]; got {x.columns.count} columns")
    added = residual and residual.columns
    if added and added.count != down.n:
        raise ValueError(f"residual must be float32 [T, {down.n}]; got {added.count} columns")
    if not routing.columns.is_whole or (added and not added.is_whole):
        raise NotImplementedError("routing and residual of recorded experts are whole matrices")
    out = Value(down.n, x.columns.value.per_token)
    return x.recording.rows(Experts(out, x.columns, gate_up, down, routing.columns, options, added))


@dataclass(eq=False)
class Concatenate(Instruction):
    """out = [a | b]."""

    operations = ("concatenate",)
    operator = "projection"
    out: Value
    a: Columns
    b: Columns

    def lower(self, program: _C.Program, places: Places) -> None:
        program.concatenate(places.value(self.out), places.columns(self.a), places.columns(self.b))


def concatenate(a: Rows, b: Rows) -> Rows:
    return a.recording.rows(Concatenate(a.like(a.columns.count + b.columns.count), a.columns, b.columns))


@dataclass(eq=False)
class HeadsLinear(Instruction):
    """out = each head of x times its own weight."""

    operations = ("heads_linear",)
    operator = "projection"
    out: Value
    x: Heads
    weights: expert_kernels.ExpertStack

    def lower(self, program: _C.Program, places: Places) -> None:
        program.heads_linear(places.value(self.out), places.heads(self.x), self.weights)


def heads_linear(x: HeadRows, weights: expert_kernels.ExpertStack) -> Rows:
    heads = x.heads
    expert_kernels.check_head_stack(weights, heads.count, heads.head_dim)
    return x.recording.rows(HeadsLinear(Value(heads.count * weights.n), heads, weights))


# -- elementwise


@dataclass(eq=False)
class Activation(Instruction):
    """out = a function of every element of x."""

    operations = ("activation",)
    operator = "mlp"
    out: Value
    x: Columns
    function: ActivationFunction

    def lower(self, program: _C.Program, places: Places) -> None:
        program.activation(places.value(self.out), places.columns(self.x), self.function)


def activation(x: Rows, activation: ActivationFunction) -> Rows:
    return x.recording.rows(Activation(x.like(), x.columns, activation))


@dataclass(eq=False)
class Glu(Instruction):
    """out = act(gate) * up, for x = [gate | up]."""

    operations = ("glu",)
    operator = "mlp"
    out: Value
    x: Columns
    function: str

    def lower(self, program: _C.Program, places: Places) -> None:
        program.glu(places.value(self.out), places.columns(self.x), self.function)


def glu(x: Rows, activation: str) -> Rows:
    if x.columns.count % 2:
        raise ValueError(f"x must be float32 [T, 2 K], gate and up; got {x.columns.count} columns")
    return x.recording.rows(Glu(x.like(x.columns.count // 2), x.columns, activation))


@dataclass(eq=False)
class Scale(Instruction):
    """x *= factor, in place."""

    operations = ("scale_",)
    operator = "norm"
    changed = "x"
    x: Columns
    factor: float

    def lower(self, program: _C.Program, places: Places) -> None:
        program.scale(places.columns(self.x), self.factor)


def scale_(x: Rows, factor: float) -> None:
    x.recording.append(Scale(x.columns, factor))


@dataclass(eq=False)
class Softcap(Instruction):
    """x = cap * tanh(x / cap), in place."""

    operations = ("softcap_",)
    operator = "lm_head"
    changed = "x"
    x: Columns
    cap: float

    def lower(self, program: _C.Program, places: Places) -> None:
        program.softcap(places.columns(self.x), self.cap)


def softcap_(x: Rows, cap: float) -> None:
    x.recording.append(Softcap(x.columns, cap))


# -- heads and attention


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


def head_layer_norm_(x: HeadRows, weight: Tensor, eps: float) -> None:
    check_head_weights(weight, x.heads.count, x.heads.head_dim)
    x.recording.append(NormHeads(x.heads, NormParameters("layer", weight, None, eps)))


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


OPERATOR_OF = {name: kind.operator for kind in Instruction.__subclasses__() for name in kind.operations}
"""Function of `ForwardOps` -> its operator; None for products, which belong to the operator of their weight."""
