"""Native linear layers against float64 and against `pace.ops.reference`, and row determinism by torch.equal."""

from __future__ import annotations

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pace import _C
from pace.ops import native, reference
from pace.ops.experts import Clamp, Xielu
from pace.ops.weight import Slabs
from tests.ops.isas import FLOATS, each_isa

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(matrix: torch.Tensor, dtype: torch.dtype, glu: bool = False) -> native.PackedWeight:
    weight = native.empty_weight(*matrix.shape, dtype, glu)
    native.pack_rows_(weight, matrix, 0)
    return weight


def inputs_as_multiplied(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in float64, rounded like the inputs of tables that multiply pairs of bf16."""
    rounds = dtype == torch.bfloat16 and _C.isa().removeprefix("emulated_") in ("avx512_bf16", "amx")
    return (x.bfloat16() if rounds else x).double()


def bound(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Error of a chain of K products in fp32: (K + 1) eps sum |x w|, doubled because tables without fma round twice."""
    return 2 * (x.shape[1] + 1) * 2.0**-24 * (x.abs() @ matrix.abs().T)


@pytest.mark.parametrize("isa", FLOATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_within_the_bound_of_its_sums(isa, dtype):
    _C.select_isa(isa)
    for rows in (1, 2, 7, 33, 130):
        for n, k in [(1, 1), (50, 67), (200, 96)]:
            matrix, x = torch.randn(n, k).to(dtype), torch.randn(rows, k)
            got = native.linear(x, packed(matrix, dtype))
            exact = inputs_as_multiplied(x, dtype)
            excess = (got - exact @ matrix.double().T).abs() / (bound(exact, matrix.double()) + 1e-30)
            assert excess.max() <= 1, f"{rows} x {n} x {k}: {excess.max():.3g} times the bound"


@pytest.mark.parametrize("isa", FLOATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_the_same_bits_however_they_are_batched(isa, dtype):
    _C.select_isa(isa)
    n, k = 96, 600
    weight, bias, x = packed(torch.randn(n, k), dtype), torch.randn(n), torch.randn(141, k)
    whole = native.linear(x, weight, bias, "gelu_new")
    for threads, counts in ((1, [1, 2, 3, 5, 6, 7, 12, 13, 24, 25, 33, 128]), (2, [1, 7, 25, 128])):
        _C.set_num_threads(threads)
        for rows in counts:
            for part in (slice(0, rows), slice(rows, 2 * rows), slice(141 - rows, 141)):
                got = native.linear(x[part], weight, bias, "gelu_new")
                assert torch.equal(got, whole[part]), f"{rows} rows, {threads} threads, {part}"


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_epilogues_agree_with_the_reference(name):
    matrix, x, bias, residual = torch.randn(38, 24), torch.randn(9, 24), torch.randn(38), torch.randn(9, 38)
    weight = packed(matrix, torch.float32)
    for b in (None, bias):
        for r in (None, residual):
            expected = reference.linear(x, reference.DenseWeight(matrix), b, name, r)
            torch.testing.assert_close(native.linear(x, weight, b, name, r), expected, rtol=1e-5, atol=1e-5)
        expected = reference.linear_glu(x, reference.DenseWeight(matrix, True), name, b)
        torch.testing.assert_close(
            native.linear_glu(x, packed(matrix, torch.float32, True), name, b), expected, rtol=1e-5, atol=1e-4
        )
    values = torch.linspace(-20, 20, 1001).view(7, 143)
    torch.testing.assert_close(
        native.activation(values, name), reference.activation(values, name), rtol=2e-6, atol=2e-6
    )


def test_native_knows_the_activations_of_the_reference():
    with pytest.raises(ValueError, match="unknown activation 'swish'; known: ") as refused:
        native.activation(torch.zeros(1), "swish")
    assert set(str(refused.value).partition("known: ")[2].split(", ")) == set(reference.ACTIVATIONS)


# -- activations with numbers

NUMBERED = (
    Clamp(-0.5, 0.75),
    Clamp(0.0, math.inf),
    Xielu(0.625, 1.25, 0.5, -1e-6),
    Xielu.from_raw(-0.3, 0.2, 0.5, -0.03125),
)


def defined(f: Clamp | Xielu, x: torch.Tensor) -> torch.Tensor:
    """The definition in float64, element by element."""
    if isinstance(f, Clamp):
        return torch.tensor([min(max(v, f.low), f.high) for v in x.flatten().tolist()]).double().view(x.shape)
    values = [
        f.beta * v + (f.alpha_p * v * v if v > 0 else f.alpha_n * (math.expm1(min(v, f.eps)) - v))
        for v in x.double().flatten().tolist()
    ]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("f", NUMBERED, ids=lambda f: f"{type(f).__name__}-{f}"[:24])
def test_activations_with_numbers(f):
    """expm1 has an error of 3 ulp of at most |x| or |eps|, and each of five other operations half an ulp of a term."""
    small = torch.logspace(-9, 0, 400)
    x = torch.cat([torch.linspace(-40, 40, 1999), small, -small, torch.zeros(1)])[None]
    expected = defined(f, x)
    size = torch.zeros(())
    if isinstance(f, Xielu):
        size = 2 * x.double().square() + 3 * x.double().abs() - 2 * f.eps
    assert ((reference.activation(x.double(), f) - expected).abs() <= 1e-14 * (1 + expected.abs())).all()
    for isa in each_isa():
        assert ((native.activation(x, f) - expected).abs() <= 8 * 2.0**-24 * size).all(), isa
    special = native.activation(torch.tensor([[math.nan, math.inf]]), f)
    assert special[0, 0].isnan() and special[0, 1] == (f.high if isinstance(f, Clamp) else math.inf)


@pytest.mark.parametrize("f", NUMBERED[::2], ids=lambda f: type(f).__name__)
def test_activations_with_numbers_in_epilogues(f):
    x, matrix, bias, residual = torch.randn(9, 24), torch.randn(38, 24), torch.randn(38), torch.randn(9, 38)
    for isa in each_isa():
        weight = packed(matrix, torch.float32)
        plain = native.linear(x, weight, bias)
        assert torch.equal(native.linear(x, weight, bias, f), native.activation(plain, f)), isa
        wanted = residual + native.activation(plain, f)
        torch.testing.assert_close(native.linear(x, weight, bias, f, residual), wanted, rtol=2**-22, atol=2**-22)
        assert torch.equal(
            native.linear(x[3:4], weight, bias, f, residual[3:4])[0], native.linear(x, weight, bias, f, residual)[3]
        )


def test_the_numbers_of_a_checkpoint_are_those_before_softplus():
    f = Xielu.from_raw(0.5, -2.0, 0.25, -1e-6)
    assert f.alpha_p == pytest.approx(math.log(1 + math.exp(0.5)), rel=1e-15)
    assert f.alpha_n == pytest.approx(0.25 + math.log(1 + math.exp(-2.0)), rel=1e-15)
    assert Xielu.from_raw(800.0, 0.0, 0.5, -1e-6).alpha_p == 800.0
    for wrong in ((math.nan, 1.0, 0.5, -1e-6), (1.0, 1.0, 0.5, 1e-6), (1.0, math.inf, 0.5, 0.0)):
        with pytest.raises(ValueError, match="the numbers of xIELU must be finite, and eps at most 0"):
            Xielu(*wrong)
    for low, high in ((1.0, 0.5), (math.nan, 1.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="low must be at most high"):
            Clamp(low, high)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source_dtype", [*DTYPES, torch.float64], ids=str)
def test_packing_rounds_like_torch_and_comes_back(dtype, source_dtype):
    big = torch.randn(70, 90) * torch.tensor([1e-7, 1e-3, 1.0, 1e3, 7e4]).repeat(18)
    source = big.to(source_dtype)[:, 5:82]  # a view with another row stride
    if source_dtype != torch.float16:  # ties of bf16 and fp16
        source[:, 0] = 1.0 + 2.0**-9 * torch.arange(70)
        source[:, 1] = 1.0 + 2.0**-12 * torch.arange(70)
    expected, ids = source.to(dtype), torch.tensor([69, 0, 33, 33, 35])
    for isa in each_isa(FLOATS):
        for glu in (False, True):
            weight = native.empty_weight(70, 77, dtype, glu)
            for begin, end in [(50, 70), (0, 3), (3, 50)]:
                native.pack_rows_(weight, source[begin:end], begin)
            assert torch.equal(native.unpack(weight), expected), (isa, glu)
            assert torch.equal(native.embedding(ids, weight), expected[ids].float()), (isa, glu)


def test_nan_and_infinity_survive_packing():
    source = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30]])
    for dtype in DTYPES:
        back = native.unpack(packed(source, dtype))
        assert back[0, 0].isnan() and torch.equal(back[0, 1:], source[0, 1:].to(dtype))


def test_a_new_weight_is_zero_and_threads_may_pack_disjoint_rows():
    matrix = torch.randn(1000, 64)
    weight = native.empty_weight(1000, 64, torch.bfloat16)
    assert not native.unpack(weight).any()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda row: native.pack_rows_(weight, matrix[row : row + 7], row), range(0, 1000, 7)))
    assert torch.equal(native.unpack(weight), matrix.bfloat16())


def test_weights_that_threads_allocate_at_once_share_no_memory():
    """Each thread waits for the other after it has read the used size. The wait times out, because only one thread at a
    time may read it."""
    both = threading.Barrier(2)

    class Meeting(int):
        def __rfloordiv__(self, used: int) -> int:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            return used // int(self)

    take = Slabs().take
    take(1)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(take, [64, 64], [Meeting(64)] * 2)
    assert abs(first.data_ptr() - second.data_ptr()) >= 64


def test_inputs_may_be_strided_and_empty():
    matrix, x = torch.randn(20, 16), torch.randn(5, 40)
    weight = packed(matrix, torch.float32)
    assert torch.equal(native.linear(x[:, 3:19], weight), native.linear(x[:, 3:19].contiguous(), weight))
    assert native.linear(torch.empty(0, 16), weight).shape == (0, 20)
    assert native.embedding(torch.empty(0, dtype=torch.int64), weight).shape == (0, 16)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda w, g: native.linear(torch.zeros(2, 9), w), ValueError, r"x must be float32 \[T, 8\]"),
        (lambda w, g: native.linear(torch.zeros(8), w), ValueError, "x must be"),
        (lambda w, g: native.linear(torch.zeros(2, 8, dtype=torch.float64), w), ValueError, "float64"),
        (lambda w, g: native.linear(torch.zeros(8, 2).T, w), ValueError, "contiguous rows"),
        (lambda w, g: native.linear(torch.zeros(2, 8), w, torch.zeros(3)), ValueError, "bias must be"),
        (
            lambda w, g: native.linear(torch.zeros(2, 8), w, activation="swish"),
            ValueError,
            "unknown activation 'swish'",
        ),
        (lambda w, g: native.linear(torch.zeros(2, 8), w, residual=torch.zeros(2, 8)), ValueError, "residual must be"),
        (lambda w, g: native.linear_glu(torch.zeros(2, 8), w, "silu"), ValueError, "glu=True"),
        (lambda w, g: native.embedding(torch.tensor([6]), w), ValueError, "ids must be in 0..5; got 6"),
        (lambda w, g: native.embedding(torch.tensor([0, -1]), w), ValueError, "got -1 at index 1"),
        (lambda w, g: native.embedding(torch.tensor([1.0]), w), TypeError, "int64"),
        (lambda w, g: native.pack_rows_(w, torch.zeros(2, 8), 5), ValueError, "row 5"),
        (lambda w, g: native.pack_rows_(w, torch.zeros(2, 8, dtype=torch.int32), 0), TypeError, "int32"),
        (lambda w, g: native.empty_weight(0, 8, torch.float32), ValueError, r"\[0, 8\]"),
        (lambda w, g: native.empty_weight(3, 8, torch.float32, True), ValueError, "3 rows"),
        (lambda w, g: native.empty_weight(3, 8, torch.int8), TypeError, "int8"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(native.empty_weight(6, 8, torch.float32), native.empty_weight(6, 8, torch.float32, True))


def test_a_weight_of_another_layout_is_refused():
    if "avx2" not in FLOATS:
        pytest.skip("needs two layouts")
    _C.select_isa("avx2")
    weight = packed(torch.randn(16, 8), torch.bfloat16)
    _C.select_isa("emulated_amx")
    with pytest.raises(ValueError, match="packed for another instruction set"):
        native.linear(torch.zeros(1, 8), weight)


def test_release_pages_keeps_what_lies_outside_of_whole_pages():
    buffer = torch.full((4 * 4096,), 7, dtype=torch.uint8)
    _C.release_pages(buffer.data_ptr() + 1, 3 * 4096)
    assert buffer[0] == 7 and buffer[-1] == 7
