"""Every published layout of quantised weights, packed by loops, is decoded to the right weights."""

from __future__ import annotations

import itertools
import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pace.checkpoints.quantized import read_quant_method
from pace.checkpoints.quantized.stored import unpack
from pace.ops.weight_layout import QuantizedRows, WeightLayout
from pace.quant.format import power_of_two
from tests.checkpoints.quantized import packers

N, K = 48, 96
GOLDEN = Path(__file__).with_name("golden.safetensors")


class Source:
    """Tensors in memory with their dtypes and shapes. `unchanged` is true if they were not written to."""

    def __init__(self, tensors):
        self.stored = tensors
        self.copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self.tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def read_stored(self, name, start=0, stop=None):
        return self.stored[name][start:stop] if self.stored[name].ndim else self.stored[name]

    def release_stored(self, name, start=0, stop=None):
        assert name in self.stored

    def unchanged(self):
        return all(torch.equal(bits(self.stored[name]), bits(copy)) for name, copy in self.copies.items())


def bits(tensor):
    return tensor.clone().flatten().view(torch.uint8)


def compressed(layout, strategy, num_bits=4, type="int", group_size=None, **weights):
    """A `quantization_config` of compressed-tensors; `group_size` is for the strategy "group" only."""
    weights |= {"num_bits": num_bits, "type": type, "strategy": strategy}
    weights["group_size"] = group_size if strategy == "group" else None
    activations = {"num_bits": 8, "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    ignored = ["lm_head", "re:.*gate$"]
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ignored, "config_groups": groups}


def cases():
    """Tuples (name, quantization_config, packer, layout of the decoded matrix)."""
    for bits, group, symmetric, order, version in itertools.product(
        (2, 3, 4, 8), (-1, 16, 32, 24), (True, False), ("sequential", "act-order", "irregular"), (1, 2)
    ):
        if order == "irregular" and group != 32 or (group == -1 and order != "sequential"):
            continue
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
        config |= {"desc_act": order != "sequential"} | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})
        minima = not symmetric and bits in (4, 8)
        size = (K if minima else None) if group == -1 else group
        fits = group != 24 and order != "irregular"
        layout = WeightLayout("int4" if bits < 8 else "int8", size, minima) if fits else torch.float32
        name = f"gptq-{bits}-{group}-{'symmetric' if symmetric else 'zeros'}-{order}-v{version}"
        pack = partial(packers.gptq, N + 16, K, bits, group, symmetric, order, version)
        yield name, config, pack, layout
    for group in (-1, 16, 48, 24):
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM"}
        layout = torch.float32 if group == 24 else WeightLayout("int4", K if group == -1 else group, True)
        yield f"awq-{group}", config, partial(packers.awq, N, K, group), layout
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    for kind, nested, (k, block, group) in itertools.product(
        ("nf4", "fp4"),
        (False, True),
        ((128, 64, 64), (96, 64, 32), (96, 32, 32), (40, 64, 0), (33, 64, 0), (4096, 4096, 4096)),
    ):
        layout = WeightLayout("int4", group, codebook=kind) if group else torch.float32
        pack = partial(packers.bitsandbytes_4bit, N - 1, k, kind, block, nested)
        yield f"bnb-{kind}-{'nested' if nested else 'plain'}-{k}-{block}", four, pack, layout
    pack = partial(packers.bitsandbytes_4bit, N, K, stored_as=torch.bfloat16)
    yield "bnb-nf4-as-bfloat16", four, pack, WeightLayout("int4", 32, codebook="nf4")
    yield "bnb-int8", {"load_in_8bit": True}, partial(packers.bitsandbytes_8bit, N, K), WeightLayout("int8", None)
    for bits, strategy, symmetric, packed in itertools.product(
        range(2, 9), ("group", "channel", "tensor"), (True, False), (True, False)
    ):
        if symmetric and not packed or strategy == "tensor" and not symmetric:
            continue
        config = compressed("pack-quantized", strategy, bits, group_size=32, symmetric=symmetric)
        minima = not symmetric and bits in (4, 8)
        size = 32 if strategy == "group" else K if minima else None
        layout = WeightLayout("int4" if bits <= 4 else "int8", size, minima)
        for spaced in (False, True) if bits in (3, 5, 6, 7) else (False,):
            pack = partial(
                packers.pack_quantized, N - 5, K, bits, strategy, 32, symmetric, "sequential", packed, spaced
            )
            zeros = "symmetric" if symmetric else "zeros"
            stored = f"{'packed' if packed else 'plain'}-{'spaced' if spaced else 'dense'}"
            yield f"packed-{bits}-{strategy}-{zeros}-{stored}", config, pack, layout
    config = compressed("pack-quantized", "group", group_size=16, actorder="group")
    for order, layout in (("act-order", WeightLayout("int4", 16)), ("irregular", torch.float32)):
        yield f"packed-{order}", config, partial(packers.pack_quantized, N, K, 4, group=16, order=order), layout
    for strategy, symmetric in itertools.product(("channel", "tensor", "group"), (True, False)):
        if strategy != "tensor" or symmetric:
            size = 32 if strategy == "group" else None if symmetric else K
            config = compressed("int-quantized", strategy, 8, group_size=32)
            pack = partial(packers.int_quantized, N, K, strategy, 32, symmetric)
            yield f"int8-{strategy}-{symmetric}", config, pack, WeightLayout("int8", size, not symmetric)
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    for block, exponents, layout in (
        ((32, 64), False, WeightLayout("float8", 64)),
        ((16, 40), False, torch.float32),
        ((1, 32), True, WeightLayout("float8", 32)),
    ):
        pack = partial(packers.float8, N, K, block, exponents=exponents)
        yield f"fp8-{block}", fp8 | {"weight_block_size": list(block)}, pack, layout
    for shape, name in itertools.product(((), (1,), (1, 1)), ("weight_scale_inv", "weight_scale")):
        pack = partial(packers.float8, N, K, (N, K), shape, name)
        yield f"fp8-tensor-{len(shape)}-{name}", fp8 | {"weight_block_size": None}, pack, WeightLayout("float8", None)
    for strategy, block, shape, size in (
        ("tensor", (N, K), (1,), None),
        ("channel", (1, K), None, None),
        ("channel", (1, K), (N,), None),
        ("group", (1, 32), None, 32),
        ("block", (32, 64), None, 64),
    ):
        structure = list(block) if strategy == "block" else None
        config = compressed("float-quantized", strategy, 8, "float", group_size=32, block_structure=structure)
        pack = partial(packers.float8, N, K, block, shape, "weight_scale")
        yield f"float8-{strategy}-{shape}", config, pack, WeightLayout("float8", size)
    config = compressed("mxfp8-quantized", "group", 8, "float", group_size=32)
    pack = partial(packers.float8, N, K, (1, 32), name="weight_scale", exponents=True)
    yield "mxfp8", config, pack, WeightLayout("float8", 32)
    mxfp4 = WeightLayout("int4", 32, codebook="mxfp4")
    yield "mxfp4", {"quant_method": "mxfp4"}, partial(packers.mxfp4, N, K), mxfp4
    pack = partial(packers.mxfp4, N, K, ("m_blocks", "m_scales"))
    yield "mxfp4-of-module", {"quant_method": "mxfp4"}, pack, mxfp4
    config = compressed("mxfp4-pack-quantized", "group", 4, "float", group_size=32)
    pack = partial(packers.mxfp4, N, K, ("m.weight_packed", "m.weight_scale"), blocked=False)
    yield "mxfp4-packed", config, pack, mxfp4
    config = compressed("mxfp6-pack-quantized", "group", 6, "float", group_size=32)
    yield "mxfp6-packed", config, partial(packers.mxfp6, N, K), WeightLayout("float8", 32)
    nvfp4 = WeightLayout("int4", 16, codebook="mxfp4")
    config = compressed("nvfp4-pack-quantized", "tensor_group", 4, "float")
    pack = partial(packers.nvfp4, N, K, ("m.weight_packed", "m.weight_global_scale"), divides=True)
    yield "nvfp4-packed", config, pack, nvfp4
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": "W4A16_NVFP4"}}}
    for algorithm in ({"quant_algo": "NVFP4"}, {"quantization": {"quant_algo": "nvfp4"}}, mixed):
        pack = partial(packers.nvfp4, N, K, ("m.weight", "m.weight_scale_2"), divides=False)
        yield f"modelopt-{algorithm}", {"quant_method": "modelopt"} | algorithm, pack, nvfp4
    for algorithm, block, shape, exponents, group in (
        ("FP8", (N, K), (), False, None),
        ("FP8_PER_CHANNEL_PER_TOKEN", (1, K), (N,), False, None),
        ("FP8_PB_WO", (128, 128), (2, 1, 3, 1), False, 128),
        ("MXFP8", (1, 32), None, True, 32),
    ):
        n, k = (256, 384) if algorithm == "FP8_PB_WO" else (N, K)
        pack = partial(packers.float8, n, k, block, shape, "weight_scale", exponents)
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        yield f"modelopt-{algorithm}", config, pack, WeightLayout("float8", group)


CASES = {name: (config, pack, dtype) for name, config, pack, dtype in cases()}


def matrix_of(config, tensors):
    source = Source(tensors)
    [matrix] = read_quant_method(config).matrices(source)
    return source, matrix


def as_floats(rows):
    return rows.dequantize() if isinstance(rows, QuantizedRows) else rows


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_the_layout_means(name):
    random.seed(0)
    torch.manual_seed(0)
    config, pack, dtype = CASES[name]
    tensors, weight = pack()
    source, matrix = matrix_of(config, tensors)
    assert matrix.name == "m.weight" and tuple(matrix.shape) == tuple(weight.shape)
    assert matrix.dtype == dtype
    assert set(matrix.parts.values()) == set(tensors), "every tensor is consumed"
    rows = matrix.read(0, weight.shape[0])
    if isinstance(dtype, WeightLayout):
        assert rows.layout == dtype
        assert (rows.order is None) == (matrix.order is None)
    # Two roundings of fp32, and a third for int8 (SCB / 127). A wrong code, scale or zero point is off by at least
    # 1e-3.
    assert packers.relative_error(as_floats(rows), weight) < 4 * 2**-24
    # Any piece of rows has the same weights.
    for start, stop in ((0, 16), (16, 32), (5, 6), (9, 43), (weight.shape[0] - 1, weight.shape[0])):
        piece = matrix.read(start, stop)
        assert torch.equal(as_floats(piece), as_floats(rows)[start:stop]), (start, stop)
        matrix.release(start, stop)
    assert source.unchanged()


with safe_open(GOLDEN, "pt") as golden:
    GOLDEN_CONFIGS = {
        name: json.loads(config) for name, config in sorted(golden.metadata().items()) if name != "format"
    }


@pytest.mark.parametrize("name", GOLDEN_CONFIGS)
def test_weights_are_those_of_the_packages_that_define_the_formats(name):
    """`make_golden.py` made them with bitsandbytes, compressed-tensors and transformers."""
    with safe_open(GOLDEN, "pt") as golden:
        tensors = {
            key.removeprefix(f"{name}/"): golden.get_tensor(key) for key in golden.keys() if key.startswith(f"{name}/")
        }
    expected = tensors.pop("expected")
    _, matrix = matrix_of(GOLDEN_CONFIGS[name], tensors)
    assert set(matrix.parts.values()) == set(tensors)
    found = as_floats(matrix.read(0, expected.shape[0]))
    # bitsandbytes dequantises int8 into float16.
    rounding = 2**-11 if expected.dtype == torch.float16 else 4 * 2**-24
    assert packers.relative_error(found, expected.double()) < rounding


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_zero_in_version_1_of_gptq(bits):
    """GPTQModel subtracts 1 from every field of a word of its version 2, with borrows. Reading undoes that."""
    random.seed(0)
    tensors, weight = packers.gptq(512, 32, bits, 16, symmetric=False, version=2)
    assert any(
        (word >> shift) % (1 << bits) == 0
        for word in tensors["m.qzeros"].flatten().tolist()
        for shift in range(0, 32, bits)
    )
    ones = sum(1 << shift for shift in range(0, 32, bits))
    tensors["m.qzeros"] = torch.tensor(
        [[packers.signed((word - ones) % (1 << 32)) for word in row] for row in tensors["m.qzeros"].tolist()],
        dtype=torch.int32,
    )
    _, matrix = matrix_of({"quant_method": "gptq", "bits": bits, "group_size": 16}, tensors)
    assert packers.relative_error(as_floats(matrix.read(0, 512)), weight) < 4 * 2**-24


def zero_points(tensors, bits, version, zero):
    """The same codes with one zero point everywhere."""
    height, count = tensors["m.qweight"].shape[1], tensors["m.scales"].shape[0]
    packed = packers.words([(zero - (version == 1)) % (1 << bits)] * height, bits)
    return tensors | {"m.qzeros": torch.tensor([packed] * count, dtype=torch.int32)}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", [32, -1])
def test_gptq_that_says_it_is_symmetric_and_has_other_zero_points(bits, version, group, caplog):
    """The zero points are used as stored, with a warning; they are refused if no method can have made them."""
    torch.manual_seed(0)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True}
    config |= {"checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    tensors, weight = packers.gptq(64, 64, bits, group, symmetric=True, version=version)
    middle = 1 << (bits - 1)
    _, matrix = matrix_of(config, zero_points(tensors, bits, version, middle))
    assert packers.relative_error(as_floats(matrix.read(0, 64)), weight) < 4 * 2**-24 and not caplog.records

    stored_otherwise = middle + (1 if version == 1 else -1)
    for zero in {stored_otherwise, version == 1, (1 << bits) - 1} - {middle}:
        spoilt = zero_points(tensors, bits, version, int(zero))
        with pytest.raises(
            ValueError, match=f"sym is true.*of {middle}, but all in tensor 'm.qzeros' are {int(zero)}"
        ) as told:
            matrix_of(config, spoilt)
        assert ("checkpoint_format" in str(told.value)) == (zero == stored_otherwise)
        for other in ({"sym": False}, {"dynamic": {"+:m": {"sym": False}}}):
            assert as_floats(matrix_of(config | other, spoilt)[1].read(0, 64)).isfinite().all()
    if version == 1:  # as the message advises
        _, matrix = matrix_of(config | {"checkpoint_format": "gptq_v2"}, zero_points(tensors, bits, 1, middle + 1))
        assert packers.relative_error(as_floats(matrix.read(0, 64)), weight) < 4 * 2**-24

    tensors, weight = packers.gptq(64, 64, bits, group, symmetric=False, version=version)
    _, matrix = matrix_of(config, tensors)
    assert packers.relative_error(as_floats(matrix.read(0, 64)), weight) < 4 * 2**-24
    assert "sym is true" in caplog.text and "m.qzeros" in caplog.text and len(caplog.records) == 1


def test_what_writers_leave_in_g_idx_where_columns_are_in_order():
    """Writers leave zeros, or an empty tensor."""
    torch.manual_seed(0)
    tensors, weight = packers.gptq(32, 64, 4, 32)
    for g_idx in (torch.zeros(64, dtype=torch.int32), None):
        stored = {name: tensor for name, tensor in (tensors | {"m.g_idx": g_idx}).items() if tensor is not None}
        _, matrix = matrix_of({"quant_method": "gptq", "bits": 4, "group_size": 32}, stored)
        assert matrix.order is None and packers.relative_error(as_floats(matrix.read(0, 32)), weight) < 4 * 2**-24


@pytest.mark.parametrize("group", [32, 64, -1])
def test_sizes_of_groups_are_those_that_dynamic_gives(group):
    """The number of groups does not determine their size: 2 groups of 96 columns may be 64 and 32. Without g_idx only
    `dynamic` has it."""
    random.seed(0)
    tensors, weight = packers.gptq(32, 96, 4, group)
    del tensors["m.g_idx"]
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "dynamic": {"-:head": None, "+:m": {"bits": 4, "group_size": group}, "+:n": {"bits": 8}},
    }
    _, matrix = matrix_of(config, tensors)
    assert packers.relative_error(as_floats(matrix.read(0, 32)), weight) < 4 * 2**-24
    with pytest.raises(
        ValueError, match=r"m\.scales' has . groups; quantization_config.group_size makes 6 or 12 of 96 inputs"
    ):
        matrix_of(config | {"dynamic": {"+:m": {"group_size": 8}}}, tensors)


def test_a_first_group_that_is_the_shorter_one():
    """A WeightLayout has its shorter group at the end, so these weights become floats."""
    random.seed(0)
    tensors, _ = packers.gptq(32, 96, 4, 64)
    index = [0] * 32 + [1] * 64
    random.shuffle(index)
    tensors["m.g_idx"] = torch.tensor(index, dtype=torch.int32)
    _, matrix = matrix_of({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}, tensors)
    codes = torch.tensor(
        [
            [int(word) >> shift & 15 for word in column for shift in range(0, 32, 4)]
            for column in tensors["m.qweight"].t()
        ]
    )
    weight = (codes - 8).double() * tensors["m.scales"].t()[:, index].double()
    assert matrix.dtype == torch.float32 and packers.relative_error(matrix.read(0, 32), weight) < 4 * 2**-24


def test_static_groups_with_act_order_are_in_order():
    """`static_groups`: columns are quantised in the order of activations, but groups are adjacent columns."""
    tensors, _ = packers.gptq(32, 64, 4, 32)
    _, matrix = matrix_of(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "static_groups": True}, tensors
    )
    assert matrix.order is None


def test_exponents_of_scales():
    exponents = torch.arange(256, dtype=torch.uint8)
    found = power_of_two(exponents)
    assert found[:255].double().tolist() == [2.0 ** (exponent - 127) for exponent in range(255)] and found[255].isnan()
    if hasattr(torch, "float8_e8m0fnu"):
        assert torch.equal(power_of_two(exponents.view(torch.float8_e8m0fnu))[:255], found[:255])


@pytest.mark.parametrize("bits", range(2, 9))
def test_fields_across_words(bits):
    random.seed(bits)
    values = [random.randrange(1 << bits) for _ in range(96)]
    assert unpack(torch.tensor([packers.words(values, bits)] * 3, dtype=torch.int32), bits).tolist() == [values] * 3


def test_a_method_that_is_null():
    assert read_quant_method(None) is None
