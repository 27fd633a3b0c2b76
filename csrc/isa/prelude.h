// Everything from outside that kernels use. It is included before a target region opens: a standard or intrinsics
// header first seen inside one would be compiled for that instruction set and, if the linker keeps that copy, crash
// older CPUs.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "pace/attention.h"
#include "pace/convert.h"
#include "pace/types.h"
