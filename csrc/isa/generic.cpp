// The kernels compiled for `generic`. See kernels/all.inl for how this works.
#include "pace/kernels.h"
#include "prelude.h"

#define PACE_ISA_NAME generic
#define PACE_ISA_LEVEL 0
#define PACE_ISA_EMULATED 0

namespace pace::generic {
#include "../kernels/all.inl"
}  // namespace pace::generic
