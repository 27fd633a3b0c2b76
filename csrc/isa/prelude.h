// All external headers that kernels use. Include it before a target region opens. A standard or intrinsics header first
// included inside a region would be compiled for that instruction set. If the linker kept that copy, older CPUs would
// crash.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "pace/attention.h"
#include "pace/convert.h"
#include "pace/grids.h"
#include "pace/prefetch.h"
#include "pace/states.h"
#include "pace/types.h"
