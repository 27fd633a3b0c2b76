// The kernels compiled for `avx2_vnni`: AVX2 with the byte dot products of processors without AVX-512 (AVX-VNNI: Alder
// Lake and later). See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME avx2_vnni
#define PACE_ISA_LEVEL 1
#define PACE_ISA_EMULATED 0
#define PACE_ISA_VPDPBUSD "%{vex%} vpdpbusd"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace pace::avx2_vnni {
#include "../kernels/all.inl"
}  // namespace pace::avx2_vnni
#pragma GCC pop_options
