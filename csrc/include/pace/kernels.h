// KernelTable: one documented function pointer per kernel. Kernels are single-threaded and work on a range that the
// caller (csrc/ops) chose; they allocate nothing and know no Python, no torch and no threads.
#pragma once

#include "pace/types.h"

namespace pace {

struct KernelTable {
    const char* name;  // as in PACE_ISA
    int level;         // PACE_ISA_LEVEL: 0 generic, 1 avx2, 2 avx512, 3 avx512_vnni, 4 avx512_bf16, 5 amx
    bool emulated;     // plain C++ twin, for tests
    int lanes;         // floats in a vector
};

// The table in use: the best this CPU has, or what PACE_ISA or select_isa() asked for.
const KernelTable& kernels();

// Changes the table in use. Throws std::invalid_argument for an unknown name or one this CPU lacks.
// Packed weights carry the layout of the table they were packed for; other tables refuse them if their layout differs.
void select_isa(const char* name);

// All tables, or those that this CPU can run, best first; the emulated ones come last.
struct IsaList {
    const KernelTable* tables[8];
    int count;
};
IsaList available_isas();

}  // namespace pace
