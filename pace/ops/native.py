"""Every operation on the C++ kernels: the native twin of `pace.ops.reference`, function by function.

Activations are float32; weights are `PackedWeight` in float32, bfloat16 or float16. The functions check shapes and dtypes and make
one call, which releases the GIL and shares its work among the threads of the pool.
"""

from pace.ops.native_linear import activation, embedding, linear, linear_glu
from pace.ops.weight import PackedWeight, empty_weight, pack_rows_, unpack

__all__ = ["PackedWeight", "activation", "embedding", "empty_weight", "linear", "linear_glu", "pack_rows_", "unpack"]
