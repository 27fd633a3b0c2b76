// The kernels of `avx2_vnni` with AVX-512's encoding of the same instruction, so that processors without AVX-VNNI can
// test them. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME avx2_vnni_evex
#define PACE_ISA_LEVEL 1
#define PACE_ISA_EMULATED 0
#define PACE_ISA_VPDPBUSD "vpdpbusd"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace pace::avx2_vnni_evex {
#include "../kernels/all.inl"
}  // namespace pace::avx2_vnni_evex
#pragma GCC pop_options
