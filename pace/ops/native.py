"""All operations on the C++ kernels; has the same functions as `pace.ops.reference`.

Activations are float32. Weights are `PackedWeight` in float32, bfloat16, float16 or quantised. Each function checks
shapes and dtypes, then makes one call, which releases the GIL and uses the threads of the pool.
"""

from pace.ops.kernels.adapters import add_adapters_, pack_matrices
from pace.ops.kernels.attention import attention, rotary_, store_kv
from pace.ops.kernels.elementwise import concatenate, gate_, given_rows, place_rows_, pool, scale_, softcap_
from pace.ops.kernels.experts import ExpertStack, empty_stack, experts, heads_linear, route, stack_nbytes
from pace.ops.kernels.linear import activation, embedding, glu, linear, linear_glu
from pace.ops.kernels.norm import gated_norm, head_layer_norm_, head_rms_norm_, layer_norm, rms_norm
from pace.ops.kernels.quantize import quantize
from pace.ops.kernels.sampling import (
    apply_mask_,
    argmax,
    sample,
    token_logprobs,
)
from pace.ops.kernels.states import causal_conv, recurrence
from pace.ops.weight import PackedWeight, empty_weight, pack_quantized_, pack_rows_, unpack, weight_nbytes

__all__ = [
    "ExpertStack",
    "PackedWeight",
    "activation",
    "add_adapters_",
    "apply_mask_",
    "argmax",
    "attention",
    "causal_conv",
    "concatenate",
    "embedding",
    "empty_stack",
    "empty_weight",
    "experts",
    "gate_",
    "gated_norm",
    "given_rows",
    "glu",
    "head_layer_norm_",
    "head_rms_norm_",
    "heads_linear",
    "layer_norm",
    "linear",
    "linear_glu",
    "pack_matrices",
    "pack_quantized_",
    "pack_rows_",
    "place_rows_",
    "pool",
    "quantize",
    "recurrence",
    "rms_norm",
    "rotary_",
    "route",
    "sample",
    "scale_",
    "softcap_",
    "stack_nbytes",
    "store_kv",
    "token_logprobs",
    "unpack",
    "weight_nbytes",
]
