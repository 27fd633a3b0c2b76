"""Columns of a matrix and heads that are not contiguous, as inputs of every instruction. A program, fused or not, gives
the bits of the kernels called one by one.

The model is made up. Its first layer goes through a narrow matrix, like latent attention. Its second has queries and
gates next to each other in each head, and keys and values too."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.batch import KVSpec, Positions
from pace.graph.program import Program
from pace.graph.recorded.heads import Attention, RotateHeads, StoreKv
from pace.graph.recorded.norms import Norm
from pace.graph.recorded.products import Linear
from pace.ops import native
from pace.ops.protocol import AttentionOptions
from tests.support import Runner, isas_of_floats

pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, HALF, RANK, VOCABULARY = 40, 4, 2, 20, 4, 24, 50
PLAIN, TURNED = HEAD_DIM - 2 * HALF, 2 * HALF
"""Numbers of elements of a head that the first layer leaves unchanged, and that it rotates."""
MAX_LENGTH = 220


class Model:
    """A model with the methods that a program records, and the attributes that a `Runner` needs."""

    def __init__(self, dtype: torch.dtype):
        self.kv_spec = KVSpec((Positions(KV_HEADS, HEAD_DIM, HEAD_DIM),) * 2, dtype)
        generator = torch.Generator().manual_seed(0)

        def weight(n: int, k: int, glu: bool = False):
            packed = native.empty_weight(n, k, dtype, glu)
            native.pack_rows_(packed, torch.randn(n, k, generator=generator) / k**0.5, 0)
            return packed

        def vector(size: int):
            return 1 + torch.randn(size, generator=generator) / 4

        self.table = weight(VOCABULARY, HIDDEN)
        self.narrow = weight(RANK + KV_HEADS * TURNED + HIDDEN, HIDDEN)
        self.narrow_norm = vector(RANK)
        self.queries = weight(HEADS * HEAD_DIM, HIDDEN)
        self.keys, self.values = weight(KV_HEADS * HEAD_DIM, RANK), weight(KV_HEADS * HEAD_DIM, RANK)
        self.turned_keys = weight(KV_HEADS * HEAD_DIM, KV_HEADS * TURNED)
        self.out = weight(HIDDEN, HEADS * HEAD_DIM)
        self.gated_queries = weight(2 * HEADS * HEAD_DIM, HIDDEN)
        self.keys_and_values = weight(2 * KV_HEADS * HEAD_DIM, HIDDEN)
        self.query_norm, self.key_norm = vector(HEAD_DIM), vector(HEAD_DIM)
        self.gate_up = weight(2 * 28, HIDDEN - 8, glu=True)
        self.down = weight(HIDDEN, 28)
        self.gated = weight(HIDDEN, HEAD_DIM)
        self.head_norm, self.head_bias = vector(HIDDEN - 4), vector(HIDDEN - 4)
        self.head = weight(VOCABULARY, HIDDEN - 4)

    def compute(self, ops, batch, angles):
        x = ops.embedding(batch.tokens, self.table)
        x = self.latent_layer(ops, x, batch, angles, batch.kv[0])
        x = self.gated_layer(ops, x, batch, angles, batch.kv[1])
        last = x[:, 2:-2][batch.logit_rows]
        return ops.linear(ops.layer_norm(last, self.head_norm, self.head_bias, 1e-5), self.head)

    def latent_layer(self, ops, x, batch, angles, kv):
        """A norm, heads in place and products read columns of one matrix; a part of each query head is rotated."""
        narrow = ops.linear(x, self.narrow)
        latent, turned = ops.rms_norm(narrow[:, :RANK], self.narrow_norm, 1e-6), narrow[:, RANK:-HIDDEN]
        ops.rotary_(turned.unflatten(1, (KV_HEADS, TURNED)), *angles[0], True)
        q = ops.linear(narrow[:, -HIDDEN:], self.queries).unflatten(1, (HEADS, HEAD_DIM))
        ops.rotary_(q[:, :, PLAIN:], *angles[0], True)
        k = ops.linear(latent, self.keys) + ops.linear(turned, self.turned_keys)
        v = ops.linear(latent, self.values)
        k, v = (part.unflatten(1, (KV_HEADS, HEAD_DIM)) for part in (k, v))
        ops.store_kv(k, v, kv, batch.slots)
        return ops.linear(ops.attention(q, kv, batch.spans, AttentionOptions(0.2)), self.out, residual=x)

    def gated_layer(self, ops, x, batch, angles, kv):
        """Operations on heads that are not contiguous are fused into attention, although the elements between the
        heads are read afterwards."""
        mixed = ops.linear(x, self.gated_queries)
        q = mixed.unflatten(1, (HEADS, 2 * HEAD_DIM))[:, :, :HEAD_DIM]
        both = ops.linear(x, self.keys_and_values).unflatten(1, (KV_HEADS, 2 * HEAD_DIM))
        k, v = both[:, :, HEAD_DIM:], both[:, :, :HEAD_DIM]
        ops.head_rms_norm_(q, self.query_norm, 1e-6)
        ops.head_rms_norm_(k, self.key_norm, 1e-6)
        ops.rotary_(q, *angles[1], False)
        ops.rotary_(k, *angles[1], False)
        ops.store_kv(k, v, kv, batch.slots)
        x = ops.linear(
            ops.attention(q, kv, batch.spans, AttentionOptions(0.2, window=150, softcap=5.0)), self.out, residual=x
        )
        x = x + ops.linear(ops.linear_glu(x[:, 8:], self.gate_up, "silu"), self.down)
        gate = ops.activation(mixed[:, HEAD_DIM : 2 * HEAD_DIM], "gelu")
        return ops.linear(x[:, 3 : 3 + HEAD_DIM] + gate, self.gated, residual=x)


def angles_of(batch):
    """Angles of two tables."""
    angles = (batch.positions[:, None] / torch.logspace(0, last, HALF) for last in (2, 1))
    return tuple((angle.cos(), angle.sin()) for angle in angles)


class OneByOne:
    """The model on the kernels."""

    def __init__(self, model: Model):
        self.model, self.kv_spec = model, model.kv_spec

    def forward(self, batch):
        return self.model.compute(native, batch, angles_of(batch))


class Recorded(OneByOne):
    """The model as a program."""

    def __init__(self, model: Model, optimise: bool):
        super().__init__(model)
        self.program = Program(model, model.kv_spec.layers, (HALF, HALF), optimise)

    def forward(self, batch):
        return self.program.run(batch, angles_of(batch))


def assert_same_bits(model: Model, steps: list[dict[int, int]]) -> None:
    """Compares the bits of both forms. `steps`: sequence -> number of tokens, for each step."""
    ids = torch.randint(0, VOCABULARY, (MAX_LENGTH,), generator=torch.Generator().manual_seed(1))
    runners = [
        Runner(runnable, 2, MAX_LENGTH) for runnable in (OneByOne(model), Recorded(model, False), Recorded(model, True))
    ]
    for step in steps:
        expected, *others = (
            runner.step({s: ids[runner.lengths[s] : runner.lengths[s] + count] for s, count in step.items()})
            for runner in runners
        )
        for s in step:
            assert torch.isfinite(expected[s]).all()
            assert all(torch.equal(other[s], expected[s]) for other in others), step
    for layers in zip(*(runner.kv for runner in runners)):
        for tensors in zip(*(layer.tensors for layer in layers)):
            assert all(torch.equal(other.nan_to_num(), tensors[0].nan_to_num()) for other in tensors[1:])


STEPS = [{0: 3}, {0: 130, 1: 40}, {0: 1, 1: 1}, {0: 1}, {1: 7, 0: 5}, {0: 1}]
"""Steps with few rows and many, and spans of one or several tiles of query rows."""


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_on_views_gives_the_bits_of_the_kernels(dtype, threads):
    _C.set_num_threads(threads)
    assert_same_bits(Model(dtype), STEPS)


@pytest.mark.parametrize("isa", isas_of_floats())
def test_on_every_table(isa):
    _C.select_isa(isa)
    assert_same_bits(Model(torch.bfloat16), STEPS)


def test_what_may_be_fused_is_and_the_rest_is_not():
    layers = Model(torch.float32).kv_spec.layers
    plain, fused = (
        Program(Model(torch.float32), layers, (HALF, HALF), optimise).instructions for optimise in (False, True)
    )
    count = lambda instructions, kind: sum(isinstance(instruction, kind) for instruction in instructions)
    assert count(plain, Norm) == 2 and count(fused, Norm) == 0
    assert sum(i.norm is not None for i in fused if isinstance(i, Linear)) == 3
    assert count(plain, StoreKv) == 2 and count(plain, RotateHeads) == 4
    assert count(fused, StoreKv) == 0 and count(fused, RotateHeads) == 2  # a part of a head is rotated before
    assert [i.preparation.rotation is not None for i in fused if isinstance(i, Attention)] == [False, True]


def test_columns_cannot_be_the_result():
    model = Model(torch.float32)
    model.compute = lambda ops, batch, angles: ops.embedding(batch.tokens, model.table)[batch.logit_rows][:, 1:]
    with pytest.raises(NotImplementedError, match="ends in a whole matrix"):
        Program(model, model.kv_spec.layers, (HALF, HALF))
