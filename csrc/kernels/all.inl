// Every kernel, in order of use. Each isa/*.cpp includes this file once, inside its own namespace and target region:
//
//   - All files are compiled with baseline flags. Only `#pragma GCC target` widens the code between push and pop. So no
//     wide code can get into an inline function that the linker shares between files.
//   - For the same reason, kernels call no standard library function that the compiler does not expand itself (memcpy).
//   - g++ does not update __AVX512F__ inside a region: kernels select by PACE_ISA_LEVEL.
//
// To add a kernel: its .inl here, its pointer in include/pace/kernels.h, its line in table.inl.
#include "vec.inl"
#include "vec_math.inl"
#include "vec_dot.inl"
#include "vec_bytes.inl"
#include "vec_integers.inl"
#include "planes.inl"
#include "tile.inl"
#include "elementwise.inl"
#include "pack.inl"
#include "quantize_weights.inl"
#include "quantize_super.inl"
#include "linear.inl"
#include "kv_cache.inl"
#include "quantize_input.inl"
#include "linear_float8.inl"
#include "linear_quantized_codes.inl"
#include "linear_quantized_many.inl"
#include "linear_quantized_amx.inl"
#include "super_blocks.inl"
#include "grid_codes.inl"
#include "linear_super_many.inl"
#include "linear_super_amx.inl"
#include "linear_super.inl"
#include "linear_quantized.inl"
#include "limits.inl"
#include "norm.inl"
#include "rotary.inl"
#include "states.inl"
#include "attention_products.inl"
#include "attention.inl"
#include "attention_partitions.inl"
#include "sampling.inl"
#include "weights.inl"
#include "table.inl"
