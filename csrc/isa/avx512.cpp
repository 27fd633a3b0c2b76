// The kernels compiled for `avx512`. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME avx512
#define PACE_ISA_LEVEL 2
#define PACE_ISA_EMULATED 0

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace pace::avx512 {
#include "../kernels/all.inl"
}  // namespace pace::avx512
#pragma GCC pop_options
