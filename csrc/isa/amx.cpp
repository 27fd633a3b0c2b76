// The kernels compiled for `amx`. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME amx
#define PACE_ISA_LEVEL 5
#define PACE_ISA_EMULATED 0

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace pace::amx {
#include "../kernels/all.inl"
}  // namespace pace::amx
#pragma GCC pop_options
