"""The reference of every op against its definition, written out as loops in float64 or taken from another source."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pace.batch import KVBlocks, KVSpec, Positions, Spans
from pace.ops import reference as ops
from pace.ops.protocol import AttentionOptions
from pace.ops.reference_parts.sampling import top_k_top_p_
from pace.ops.weight_layout import QuantizedRows, WeightLayout
from tests.support import backend, backends

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(ours, exact, terms, scale):
    """True if the error is within `terms` roundings, each of at most eps times `scale` (the sum of absolute terms)."""
    return bool(((ours.double() - exact).abs() <= terms * EPS * scale).all())


def filled(matrix, dtype=torch.float32, glu=False):
    weight = ops.empty_weight(*matrix.shape, dtype, glu)
    ops.pack_rows_(weight, matrix, 0)
    return weight


# ----------------------------------------------------------------------------------------------------------------
# weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_holds_what_was_packed(dtype):
    matrix = torch.randn(6, 5)
    weight = ops.empty_weight(6, 5, dtype)
    assert not ops.unpack(weight).any()
    ops.pack_rows_(weight, matrix[:2], 0)
    ops.pack_rows_(weight, matrix[2:].bfloat16(), 2)
    expected = torch.cat([matrix[:2], matrix[2:].bfloat16().float()]).to(dtype)
    assert torch.equal(ops.unpack(weight), expected)
    assert (weight.n, weight.k, weight.dtype, weight.glu, weight.nbytes) == (6, 5, dtype, False, 30 * dtype.itemsize)


def test_a_quantised_weight_holds_the_values_of_its_rows():
    torch.manual_seed(0)
    layout, order = WeightLayout("int4", 16, has_mins=True), torch.randperm(20)
    rows = QuantizedRows(
        layout, torch.randint(16, (6, 20), dtype=torch.uint8), torch.randn(6, 2), torch.randn(6, 2), order
    )
    weight = ops.empty_weight(8, 20, layout, True, order)
    ops.pack_quantized_(weight, rows, 2)
    assert torch.equal(ops.unpack(weight), torch.cat([torch.zeros(2, 20), rows.dequantize()]))
    assert (weight.layout, weight.dtype, weight.nbytes) == (
        layout,
        torch.float32,
        ops.weight_nbytes(8, 20, layout, True),
    )
    x = torch.randn(3, 20, dtype=torch.float64)
    gate, up = x @ ops.unpack(weight)[:4].double().T, x @ ops.unpack(weight)[4:].double().T
    torch.testing.assert_close(ops.linear_glu(x, weight, "relu"), gate.relu() * up)


@pytest.mark.parametrize("name", backends())
def test_mistakes_about_quantised_weights_are_named(name):
    ops, layout = backend(name), WeightLayout("int4", 16)
    rows = QuantizedRows(layout, torch.zeros(3, 20, dtype=torch.uint8), torch.ones(3, 2))
    weight, of_floats = ops.empty_weight(6, 20, layout), ops.empty_weight(6, 20, torch.float32)
    others = replace(rows, layout=WeightLayout("int4", 16, codebook="nf4"))
    for call, message in (
        (lambda: ops.pack_rows_(weight, rows.dequantize(), 0), "pack_quantized_"),
        (lambda: ops.pack_quantized_(weight, rows, 5), "row 5"),
        (lambda: ops.pack_quantized_(weight, replace(rows, order=torch.arange(20).flip(0)), 0), "another one"),
        (lambda: ops.pack_quantized_(weight, others, 0), "rows of nf4"),
        (lambda: ops.pack_quantized_(of_floats, rows, 0), "torch.float32"),
        (lambda: ops.empty_weight(6, 20, layout, order=torch.zeros(20, dtype=torch.int64)), "permutation"),
        (lambda: ops.empty_weight(6, 20, torch.float32, order=torch.arange(20)), "only quantised"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(("shape", "row"), [((2, 4), 0), ((2, 5), 5), ((7, 5), 0), ((5,), 0), ((2, 5), -1)])
def test_rows_that_do_not_fit_are_refused(shape, row):
    with pytest.raises(ValueError, match=r"shape \(6, 5\)"):
        ops.pack_rows_(ops.empty_weight(6, 5, torch.float32), torch.zeros(shape), row)


def test_gate_and_up_are_halves():
    with pytest.raises(ValueError, match="gate"):
        ops.empty_weight(5, 4, torch.float32, glu=True)


# ---------------------------------------------------------------------------------------------------- linear,
# activations


def test_embedding_gives_rows_in_float32():
    matrix = torch.randn(7, 4).bfloat16()
    rows = ops.embedding(torch.tensor([3, 0, 6, 3]), filled(matrix, torch.bfloat16))
    assert rows.dtype == torch.float32 and torch.equal(rows, matrix.float()[[3, 0, 6, 3]])
    for wrong in (-1, 7):
        with pytest.raises(ValueError, match="0..6"):
            ops.embedding(torch.tensor([0, wrong]), filled(matrix, torch.bfloat16))


DEFINITIONS = {
    "silu": lambda v: v / (1 + math.exp(-v)),
    "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    "gelu_new": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "gelu_fast": lambda v: 0.5 * v * (1 + math.tanh(v * 0.7978845608 * (1 + 0.044715 * v * v))),
    "quick_gelu": lambda v: v / (1 + math.exp(-1.702 * v)),
    "relu": lambda v: max(v, 0.0),
    "relu2": lambda v: max(v, 0.0) ** 2,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_activations(name):
    x = torch.cat([torch.linspace(-9, 9, 181), torch.tensor([0.0, -0.0, 60.0, -60.0])]).double()
    expected = torch.tensor([DEFINITIONS[name](v) for v in x.tolist()], dtype=torch.float64)
    assert ops.ACTIVATIONS.keys() == DEFINITIONS.keys()
    torch.testing.assert_close(ops.activation(x, name), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_linear_is_residual_plus_activation_of_product_plus_bias(tokens):
    x, matrix, bias, residual = torch.randn(tokens, 8), torch.randn(5, 8), torch.randn(5), torch.randn(tokens, 5)
    weight = filled(matrix)
    product = x.double() @ matrix.double().T
    size = x.double().abs() @ matrix.double().abs().T + 3
    assert close(ops.linear(x, weight), product, 8, size)
    assert close(ops.linear(x, weight, bias), product + bias, 9, size)
    whole = residual + torch.relu(product + bias)
    assert close(ops.linear(x, weight, bias, "relu", residual), whole, 10, size + residual.abs())


def test_linear_glu_multiplies_the_activated_gate_by_up():
    x, matrix, bias = torch.randn(3, 8).double(), torch.randn(6, 8).double(), torch.randn(6).double()
    weight = filled(matrix, torch.float64, glu=True)
    gate, up = x @ matrix[:3].T, x @ matrix[3:].T
    torch.testing.assert_close(ops.linear_glu(x, weight, "silu"), gate * gate.sigmoid() * up)
    gate, up = gate + bias[:3], up + bias[3:]
    torch.testing.assert_close(ops.linear_glu(x, weight, "silu", bias), gate * gate.sigmoid() * up)


# ------------------------------------------------------------------------------------------------------------------
# norms


def test_rms_norm():
    x, weight = torch.randn(4, 6).double(), torch.randn(6).double()
    expected = x / (x.pow(2).sum(-1, keepdim=True) / 6 + 0.01).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 0.01), expected)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine):
    x = torch.randn(4, 6).double()
    weight, bias = (torch.randn(6).double(), torch.randn(6).double()) if affine else (None, None)
    centred = x - x.sum(-1, keepdim=True) / 6
    y = centred / (centred.pow(2).sum(-1, keepdim=True) / 6 + 0.01).sqrt()
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 0.01), y * weight + bias if affine else y)


def test_head_rms_norm_works_on_a_view():
    buffer = torch.randn(3, 5, 4)
    before = buffer.clone()
    ops.head_rms_norm_(buffer[:, 1:3], torch.arange(1.0, 5.0), 1e-6)
    assert torch.equal(buffer[:, 1:3], ops.rms_norm(before[:, 1:3], torch.arange(1.0, 5.0), 1e-6))
    assert torch.equal(buffer[:, [0, 3, 4]], before[:, [0, 3, 4]])


# --------------------------------------------------------------------------------------------------------------
# attention


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [4, 6])
def test_rotary_turns_pairs_as_complex_numbers(interleaved, rotated):
    buffer = torch.randn(3, 5, 6).double()
    before = buffer.clone()
    angle = torch.randn(3, rotated // 2).double()
    ops.rotary_(buffer[:, :2], angle.cos(), angle.sin(), interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2) for i in range(rotated // 2)]
    for t in range(3):
        for h in range(2):
            for i, (a, b) in enumerate(pairs):
                turned = complex(before[t, h, a], before[t, h, b]) * complex(
                    math.cos(angle[t, i]), math.sin(angle[t, i])
                )
                assert buffer[t, h, a] == pytest.approx(turned.real) and buffer[t, h, b] == pytest.approx(turned.imag)
    assert torch.equal(buffer[:, :2, rotated:], before[:, :2, rotated:])
    assert torch.equal(buffer[:, 2:], before[:, 2:])


def test_stored_keys_and_values_are_where_the_layout_says():
    kv = KVSpec((Positions(2, 5, 5),), torch.bfloat16).allocate(3)[0]
    assert kv.k.shape == (3, 2, 5, 16) and kv.v.shape == (3, 2, 16, 16)
    kv.k.fill_(7), kv.v.fill_(7)
    heads = torch.randn(4, 4, 5)
    slots = torch.tensor([0, 15, 16, 45])
    ops.store_kv(heads[:, :2], heads[:, 2:], kv, slots)
    for t, slot in enumerate(slots.tolist()):
        assert torch.equal(kv.k[slot // 16, :, :, slot % 16], heads[t, :2].bfloat16())
        assert torch.equal(kv.v[slot // 16, :, slot % 16, :5], heads[t, 2:].bfloat16())
    untouched = torch.tensor([slot for slot in range(48) if slot not in slots])
    assert (kv.k.permute(0, 3, 1, 2).flatten(0, 1)[untouched] == 7).all()
    assert (kv.v.permute(0, 2, 1, 3).flatten(0, 1)[untouched] == 7).all()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (5, None), (17, None), (None, 2.0), (5, 0.5)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("has_newest", [False, True])
def test_attention_is_its_definition(window, softcap, heads, kv_heads, has_newest):
    """Three spans, written out query by query: a whole prompt, and a single token and a chunk after earlier tokens.
    Blocks that lie wholly before the window of a span's first token are freed. Newest positions are random."""
    dim, lengths, new = 5, [9, 20, 33], [9, 1, 14]
    keys = [torch.randn(n, kv_heads, dim).double() for n in lengths]
    values = [torch.randn(n, kv_heads, dim).double() for n in lengths]
    kv = KVBlocks(
        torch.full((8, kv_heads, dim, 16), torch.nan).double(), torch.full((8, kv_heads, 16, 16), torch.nan).double()
    )
    table = torch.tensor([[6, -1, 99], [0, 3, -5], [5, 2, 4]], dtype=torch.int32)
    for s, n in enumerate(lengths):
        p = torch.arange(n)
        ops.store_kv(keys[s], values[s], kv, table[s, p // 16].long() * 16 + p % 16)
        table[s, : max(0, n - new[s] - (window or n) + 1) // 16] = -1
    starts = torch.tensor([0, 9, 10, 24], dtype=torch.int32)
    q = torch.randn(24, heads, dim).double()
    positions = [(s, n - new[s] + j) for s, n in enumerate(lengths) for j in range(new[s])]
    firsts = [0 if window is None else max(0, position - window + 1) for _, position in positions]
    lasts = [position for _, position in positions]
    if has_newest:
        lasts = [int(torch.randint(first, lengths[s], ())) for first, (s, _) in zip(firsts, positions)]
    newest = torch.tensor(lasts, dtype=torch.int32) if has_newest else None
    spans = Spans(starts, torch.tensor(lengths, dtype=torch.int32), table, newest)
    out = ops.attention(q, kv, spans, AttentionOptions(0.3, window, softcap))

    for token, ((s, _), first, last) in enumerate(zip(positions, firsts, lasts)):
        for h in range(heads):
            g = h * kv_heads // heads
            scores = 0.3 * keys[s][first : last + 1, g] @ q[token, h]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            expected = scores.softmax(0) @ values[s][first : last + 1, g]
            torch.testing.assert_close(out[token, h * dim : (h + 1) * dim], expected)


# ---------------------------------------------------------------------------------------------------------------
# sampling


def test_argmax_takes_the_first_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, -1.0, 5.0, 5.0], [-math.inf, -math.inf, -2.0, -2.0]])
    assert ops.argmax(logits).tolist() == [1, 0, 2]
    logits = torch.tensor(
        [[1.0, math.nan], [math.nan, math.inf], [math.inf, 1.0], [-math.inf, -math.inf], [math.nan, -math.inf]]
    )
    assert ops.argmax(logits).tolist() == [-1, -1, -1, -1, -1]


def kept(logits, k, p):
    filtered = torch.tensor([logits], dtype=torch.float32)
    top_k_top_p_(filtered, torch.tensor([k]), torch.tensor([p]))
    stays = filtered[0] != -math.inf
    assert torch.equal(filtered[0][stays], torch.tensor(logits)[stays])
    return stays.nonzero()[:, 0].tolist()


def test_top_k_and_top_p():
    logits = [math.log(v) for v in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits, 0, 1.0) == [0, 1, 2, 3]
    assert kept(logits, 1, 1.0) == [1]
    assert kept(logits, 3, 1.0) == [1, 2, 3]
    assert kept(logits, 99, 1.0) == [0, 1, 2, 3]
    assert kept(logits, 0, 0.39) == [1]
    assert kept(logits, 0, 0.41) == [1, 3]
    assert kept(logits, 0, 0.71) == [1, 2, 3]
    assert kept(logits, 0, 1e-9) == [1]
    assert kept(logits, 2, 0.5) == [1]  # of the two left, the first holds 4/7
    assert kept(logits, 2, 0.6) == [1, 3]
    assert kept([2.0, 1.0, 2.0, 2.0], 2, 1.0) == [0, 2, 3]  # equal to the second largest
    assert kept([1.0, 1.0, 1.0, 1.0], 0, 0.5) == [0, 1]  # of equal values, the lowest index


def test_top_k_and_top_p_are_those_of_transformers():
    generation = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(64, 50) * 3
    top_k, top_p = torch.randint(1, 50, (64,)), torch.rand(64)
    expected = []
    for row, k, p in zip(logits, top_k.tolist(), top_p.tolist(), strict=True):
        scores = generation.TopKLogitsWarper(k)(None, row[None].clone())
        expected.append(generation.TopPLogitsWarper(p)(None, scores)[0])
    ours = logits.clone()
    top_k_top_p_(ours, top_k, top_p)
    assert torch.equal(ours, torch.stack(expected))
    assert ours.isinf().any() and ours.isfinite().sum(-1).max() > 1
