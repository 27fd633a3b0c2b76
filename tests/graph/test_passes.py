"""The graph rewrites preserve results, and no two live values share a buffer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pace.graph.instructions import Columns, Heads, Value, overlap
from pace.graph.passes import fuse_adapters, fuse_heads, fuse_norms, plan_buffers
from pace.graph.recorded.elementwise import Glu
from pace.graph.recorded.heads import Attention, NormHeads, Preparation, RotateHeads, Rotation, StoreKv
from pace.graph.recorded.norms import Norm
from pace.graph.recorded.products import AddAdapters, Linear
from pace.graph.recorded.rows import Embedding
from pace.graph.symbols import Add
from pace.ops.adapters import AdapterTable
from pace.ops.kernels.norm import NormParameters
from pace.ops.protocol import AttentionOptions
from pace.ops.weight import PackedWeight

RMS = NormParameters("rms", torch.ones(8), None, 1e-5)
TURN = Rotation(0, 2, False)


def weight(n=8, k=8):
    return PackedWeight(n, k, torch.float32)


def linear(x, residual=None, columns=8):
    return Linear(Value(columns), x.whole, weight(columns, x.columns), None, None, residual and residual.whole)


def test_a_norm_that_only_linears_read_becomes_part_of_them():
    x = Value(8)
    norm = Norm(Value(8), x.whole, RMS)
    first, second = linear(norm.out), linear(norm.out, residual=x)
    fused = fuse_norms([norm, first, second], second.out)
    assert [(i.x, i.norm, i.residual, i.out) for i in fused] == [
        (x.whole, RMS, None, first.out),
        (x.whole, RMS, x.whole, second.out),
    ]


@pytest.mark.parametrize("also", ["residual", "add", "attention"])
def test_a_norm_that_others_read_too_stays(also):
    norm = Norm(Value(8), Value(8).whole, RMS)
    other = {
        "residual": linear(Value(8), residual=norm.out),
        "add": Add(Value(8), norm.out.whole, Value(8).whole),
        "attention": Attention(Value(8), Heads(norm.out, 0, 2, 4, 4), 0, AttentionOptions(1.0)),
    }[also]
    instructions = [norm, linear(norm.out), other]
    assert fuse_norms(instructions, other.out) == instructions


def test_norms_of_norms_are_not_fused_twice():
    inner = Norm(Value(8), Value(8).whole, RMS)
    outer = Norm(Value(8), inner.out.whole, RMS)
    fused = fuse_norms([inner, outer, last := linear(outer.out)], last.out)
    assert fused[0] is inner and fused[1].x == inner.out.whole and len(fused) == 2


def test_adapters_and_the_gate_become_part_of_their_product():
    x, table = Value(8), AdapterTable(8, [8, 8], 1, 4, torch.float32)
    gate_up = Linear(Value(16), x.whole, PackedWeight(16, 8, torch.float32, glu=True), None, None, None, apart=True)
    added = AddAdapters(gate_up.out.whole, x.whole, table)
    glu = Glu(Value(8), gate_up.out.whole, "silu")
    (fused,) = fuse_adapters([gate_up, added, glu])
    assert (fused.adapters, fused.activation, fused.apart, fused.out) == (table, "silu", False, glu.out)
    norm = Norm(x, Value(8).whole, RMS)
    assert [i.norm for i in fuse_norms(fuse_adapters([norm, gate_up, added, glu]), glu.out)] == [RMS]

    reader = Norm(Value(16), gate_up.out.whole, RMS)  # also reads gate and up
    apart, *rest = fuse_adapters([gate_up, added, glu, reader])
    assert (apart.adapters, apart.activation, apart.out, rest) == (table, None, gate_up.out, [glu, reader])

    plain, other = linear(x), linear(Value(8))
    active = replace(plain, activation="gelu")
    for product, more in ((active, {}), (plain, {"x": other.x}), (plain, {"norm": RMS}), (other, {})):
        single = [product, replace(AddAdapters(plain.out.whole, x.whole, table), **more)]
        assert fuse_adapters(single) == single
    (fused,) = fuse_adapters([plain, AddAdapters(plain.out.whole, x.whole, table)])
    assert fused.adapters is table and fused.out is plain.out


def heads_of(value):
    return Heads(value, 0, 2, 4, 4), Heads(value, 8, 1, 4, 4), Heads(value, 12, 1, 4, 4)


def attention(value, layer=0):
    q, k, v = heads_of(value)
    return [StoreKv(k, v, layer=0), Attention(Value(8), q, layer, AttentionOptions(1.0))]


@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_what_happens_to_heads_becomes_part_of_attention(norms, rotates, norm_last):
    value = Value(16)
    q, k, v = heads_of(value)
    steps = [[NormHeads(q, RMS), NormHeads(k, RMS)] * norms, [RotateHeads(q, TURN), RotateHeads(k, TURN)] * rotates]
    first, second = reversed(steps) if norm_last else steps
    (fused,) = fuse_heads([*first, *second, *attention(value)])
    norm = RMS if norms else None
    assert fused.preparation == Preparation(
        k, v, norm, norm, TURN if rotates else None, norm_last and norms and rotates
    )
    assert fused.q == q and list(fused.reads()) == [q, k, v]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_norm_of_values_becomes_part_of_attention(place):
    value, latent_q = Value(16), Heads(Value(8), 0, 2, 4, 4)
    q, k, v = heads_of(value)
    before = [RotateHeads(q, TURN), RotateHeads(k, TURN)]
    before.insert(place, NormHeads(v, RMS))
    store, attend = attention(value)
    attend = replace(attend, latent_q=latent_q)
    (fused,) = fuse_heads([*before, store, attend])
    assert fused.preparation == Preparation(k, v, rotation=TURN, value_norm=RMS)
    assert list(fused.reads()) == [q, latent_q, k, v]

    others = [
        [*before, store, attend, Norm(Value(4), Columns(value, 12, 4), RMS)],  # a norm reads the values
        [*before, store, replace(attend, latent_q=Heads(value, 8, 2, 4, 4))],  # latent queries share their columns
        [*before, NormHeads(v, RMS), store, attend],  # values are normalised twice
        [*before, RotateHeads(v, TURN), store, attend],
    ]
    for instructions in others:
        assert fuse_heads(instructions) == instructions


def test_heads_in_another_order_stay_as_they_are():
    value, other = Value(16), Value(16)
    q, k, _ = heads_of(value)
    for before in (
        [RotateHeads(q, TURN), NormHeads(q, RMS), RotateHeads(k, TURN)],  # one norm between the rotations
        [RotateHeads(q, TURN)],  # keys are not rotated
        [RotateHeads(q, TURN), RotateHeads(k, Rotation(0, 2, True))],  # keys are rotated in another way
        [RotateHeads(q, TURN), RotateHeads(k, Rotation(1, 2, False))],  # keys are rotated by another table
        [NormHeads(q, RMS), NormHeads(q, RMS)],  # queries are normalised twice
    ):
        instructions = [*before, *attention(value)]
        assert fuse_heads(instructions) == instructions
    foreign = RotateHeads(heads_of(other)[0], TURN)
    assert fuse_heads([foreign, *attention(value)])[0] is foreign
    elsewhere = [
        RotateHeads(q, TURN),
        RotateHeads(k, TURN),
        *attention(value, layer=1),
    ]  # attention of a layer that was not stored
    assert fuse_heads(elsewhere) == elsewhere


def test_a_norm_does_not_wait_until_what_it_reads_is_changed():
    value = Value(16)
    part = Norm(Value(8), Columns(value, 4, 8), RMS)
    reader = linear(part.out)
    for column, fuses in ((0, True), (2, False), (8, False), (12, True)):
        turn = RotateHeads(Heads(value, column, 1, 4, 4), TURN)
        fused = fuse_norms([part, turn, reader], reader.out)
        assert len(fused) == 2 if fuses else fused == [part, turn, reader], column
        assert len(fuse_norms([part, reader, turn], reader.out)) == 2  # changed afterwards


def test_queries_and_keys_that_others_read_or_share_stay_as_they_are():
    value = Value(16)
    q, k, v = heads_of(value)
    before = [RotateHeads(q, TURN), RotateHeads(k, TURN)]
    assert len(fuse_heads([*before, *attention(value), Norm(Value(4), Columns(value, 12, 4), RMS)])) == 2
    for read in (Columns(value, 0, 4), Columns(value, 6, 4), value.whole):
        instructions = [*before, *attention(value), Norm(Value(read.count), read, RMS)]
        assert fuse_heads(instructions) == instructions
    values_are_keys = [*before, StoreKv(k, k, 0), Attention(Value(8), q, 0, AttentionOptions(1.0))]
    assert fuse_heads(values_are_keys) == values_are_keys


def test_views_overlap_where_they_share_a_column():
    value = Value(24)
    first, second = Heads(value, 0, 3, 4, 8), Heads(value, 4, 3, 4, 8)  # the halves of heads of 8
    assert not overlap(first, second) and overlap(first, first)
    assert overlap(first, Columns(value, 3, 3)) and not overlap(first, Columns(value, 4, 4))
    assert not overlap(first, Heads(Value(24), 0, 3, 4, 8))


def check_plan(instructions, result):
    """Runs the plan on names instead of numbers: each read must find the last write to that value."""
    plan = plan_buffers(instructions, result)
    content = {}
    for instruction in instructions:
        for value in (operand.value for operand in instruction.reads()):
            assert value is result or content[plan.number[value]] is value, "overwritten while it was needed"
        value = instruction.makes()
        if value is not result:
            assert plan.widths[plan.number[value]] >= value.columns
            content[plan.number[value]] = value
    return plan


def source():
    return Embedding(Value(8), weight(), False, 0)


def test_no_living_values_share_a_buffer():
    for seed in range(300):
        rng = random.Random(seed)
        instructions = [source()]
        for _ in range(rng.randint(1, 12)):
            values = [instruction.out for instruction in instructions]
            x, residual = rng.choice(values), rng.choice([None, *values])
            columns = residual.columns if residual else rng.choice([4, 8, 32])
            instructions.append(rng.choice([linear(x, residual, columns), Add(Value(x.columns), x.whole, x.whole)]))
        check_plan(instructions, instructions[-1].out)


def test_a_chain_needs_two_buffers_and_a_residual_none():
    chain = [source()]
    for _ in range(6):
        chain.append(linear(chain[-1].out))
    assert len(check_plan(chain, chain[-1].out).widths) == 2

    start = source()
    inner = linear(start.out, columns=32)
    last = linear(inner.out, residual=start.out)
    end = linear(last.out)
    plan = check_plan([start, inner, last, end], end.out)
    assert plan.number[last.out] == plan.number[start.out] and plan.widths == [8, 32]
