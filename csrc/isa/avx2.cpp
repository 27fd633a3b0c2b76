// The kernels compiled for `avx2`. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME avx2
#define PACE_ISA_LEVEL 1
#define PACE_ISA_EMULATED 0

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace pace::avx2 {
#include "../kernels/all.inl"
}  // namespace pace::avx2
#pragma GCC pop_options
