// The kernels compiled for `emulated_amx`. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME emulated_amx
#define PACE_ISA_LEVEL 5
#define PACE_ISA_EMULATED 1

namespace pace::emulated_amx {
#include "../kernels/all.inl"
}  // namespace pace::emulated_amx
