// The kernels compiled for `avx512_bf16`. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME avx512_bf16
#define PACE_ISA_LEVEL 4
#define PACE_ISA_EMULATED 0

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace pace::avx512_bf16 {
#include "../kernels/all.inl"
}  // namespace pace::avx512_bf16
#pragma GCC pop_options
