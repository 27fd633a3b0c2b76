// The kernels compiled for `emulated_avx512_bf16`. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME emulated_avx512_bf16
#define PACE_ISA_LEVEL 4
#define PACE_ISA_EMULATED 1

namespace pace::emulated_avx512_bf16 {
#include "../kernels/all.inl"
}  // namespace pace::emulated_avx512_bf16
