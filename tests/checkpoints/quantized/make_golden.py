"""Writes `golden.safetensors`: small matrices quantised and dequantised by the packages that define the formats.

    pip install torch==2.13.0 compressed-tensors==0.20.0 bitsandbytes==0.50.2 transformers==5.23.0
    python tests/checkpoints/quantized/make_golden.py

For each case `c`: its tensors as `c/m....` and the package's own weights as `c/expected`; the configs are in the file's
metadata."""

from __future__ import annotations

import json
from pathlib import Path

import bitsandbytes
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

N, K = 10, 64
GOLDEN = Path(__file__).with_name("golden.safetensors")


def bitsandbytes_cases(weight):
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    # If blocks cross rows, the package's CPU kernel takes wrong scales (0.50.2). Odd row lengths use another code path.
    for kind, nested, k in (("nf4", False, 64), ("nf4", True, 64), ("fp4", False, 64), ("nf4", False, 33)):
        matrix = weight[:, :k].contiguous()
        codes, state = bitsandbytes.functional.quantize_4bit(
            matrix, blocksize=32, compress_statistics=nested, quant_type=kind
        )
        packed = state.as_dict(packed=True)
        tensors = {"m.weight": codes} | {f"m.weight.{name}": value for name, value in packed.items()}
        expected = bitsandbytes.functional.dequantize_4bit(codes, state)
        yield f"bitsandbytes-{kind}{'-nested' * nested}-{k}", four, tensors, expected
    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    expected = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)
    yield (
        "bitsandbytes-int8",
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"m.weight": codes, "m.SCB": scales},
        expected,
    )


def compressed_tensors_cases(weight):
    for layout, arguments in (
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 32]}),
        (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        ),
        (
            "mxfp8-quantized",
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        ),
        (
            "mxfp6-pack-quantized",
            {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        ),
        (
            "nvfp4-pack-quantized",
            {
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn,
            },
        ),
    ):  # fmt: skip
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        low, high = extremes(weight, arguments)
        of_matrix = {}
        if arguments["strategy"] == "tensor_group":
            of_matrix["global_scale"] = generate_gparam(weight.amin(), weight.amax())
        scale, zero = calculate_qparams(low, high, scheme.weights, **of_matrix)
        state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
        state |= {f"weight_{name}": value for name, value in of_matrix.items()}
        compressor = BaseCompressor.get_value_from_registry(layout)
        stored = compressor.compress(dict(state), scheme)
        expected = compressor.decompress(dict(stored), scheme)["weight"].float()
        if of_matrix:  # `decompress` rounds to bfloat16
            codes = unpack_fp4_from_uint8(stored["weight_packed"], N, K, torch.float32)
            expected = dequantize(codes, stored["weight_scale"].float(), args=scheme.weights, **of_matrix)
        config = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        symmetric = "" if arguments.get("symmetric", True) else "-zeros"
        name = f"compressed-tensors-{layout}-{arguments['num_bits']}-{arguments['strategy']}{symmetric}"
        yield name, config, {f"m.{key}": value for key, value in stored.items()}, expected


def extremes(weight, arguments):
    """Smallest and largest weight of each group."""
    if arguments["strategy"] == "tensor":
        parts = weight.flatten()[None]
    elif arguments["strategy"] == "block":
        rows, columns = arguments["block_structure"]
        padded = torch.nn.functional.pad(weight, (0, -K % columns, 0, -N % rows))
        parts = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    else:
        parts = weight.unflatten(1, (-1, arguments.get("group_size", K)))
    return parts.amin(-1).reshape(parts.shape[:-1]), parts.amax(-1).reshape(parts.shape[:-1])


def transformers_cases(weight):
    codes = (weight * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) * 0.01 + 0.001
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales)
    config = {"quant_method": "fp8", "weight_block_size": [5, 32]}
    yield "transformers-fp8-block", config, {"m.weight": codes, "m.weight_scale_inv": scales}, expected
    blocks = torch.randint(0, 256, (1, N, K // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(118, 126, (1, N, K // 32), dtype=torch.uint8)
    expected = (
        convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)[0].t().contiguous()
    )  # a gpt-oss expert's weight, [K, N]
    yield (
        "transformers-mxfp4",
        {"quant_method": "mxfp4"},
        {"m.weight_blocks": blocks[0], "m.weight_scales": exponents[0]},
        expected,
    )


def main():
    torch.manual_seed(0)
    weight = torch.randn(N, K) * 0.05
    tensors, configs = {}, {}
    for cases in (bitsandbytes_cases, compressed_tensors_cases, transformers_cases):
        for name, config, stored, expected in cases(weight):
            configs[name] = json.dumps(config)
            tensors |= {f"{name}/{key}": value.contiguous() for key, value in stored.items()}
            tensors[f"{name}/expected"] = expected.contiguous()
            print(name, {key: (str(value.dtype), list(value.shape)) for key, value in stored.items()}, expected.dtype)
    save_file(tensors, GOLDEN, metadata=configs)
    print(GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
