// Picks the kernel table, once. PACE_ISA forces one and fails loudly on nonsense.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/cpu.h"
#include "pace/kernels.h"

namespace pace {

#define PACE_DECLARE_TABLE(isa)            \
    namespace isa {                        \
    extern const KernelTable kernel_table; \
    }
PACE_DECLARE_TABLE(generic)
PACE_DECLARE_TABLE(avx2)
PACE_DECLARE_TABLE(avx2_vnni)
PACE_DECLARE_TABLE(avx2_vnni_evex)
PACE_DECLARE_TABLE(avx512)
PACE_DECLARE_TABLE(avx512_vnni)
PACE_DECLARE_TABLE(avx512_bf16)
PACE_DECLARE_TABLE(amx)
PACE_DECLARE_TABLE(emulated_avx512_bf16)
PACE_DECLARE_TABLE(emulated_amx)
#undef PACE_DECLARE_TABLE

namespace {

bool any_cpu(const CpuFeatures&) { return true; }
bool has_avx2(const CpuFeatures& cpu) { return cpu.avx2 && cpu.fma && cpu.f16c; }
bool has_avx2_vnni(const CpuFeatures& cpu) { return has_avx2(cpu) && cpu.avx_vnni; }
bool has_avx512(const CpuFeatures& cpu) {
    return has_avx2(cpu) && cpu.avx512f && cpu.avx512bw && cpu.avx512dq && cpu.avx512vl;
}
bool has_avx512_vnni(const CpuFeatures& cpu) { return has_avx512(cpu) && cpu.avx512_vnni; }
bool has_avx512_bf16(const CpuFeatures& cpu) { return has_avx512_vnni(cpu) && cpu.avx512_bf16; }
bool has_amx(const CpuFeatures& cpu) { return has_avx512_bf16(cpu) && cpu.amx_tile && cpu.amx_bf16 && cpu.amx_int8; }

struct Candidate {
    const KernelTable* table;
    bool (*runs)(const CpuFeatures&);
};

// The first that runs is chosen; those after `generic` serve tests.
const Candidate kAllTables[] = {
    {&amx::kernel_table, has_amx},
    {&avx512_bf16::kernel_table, has_avx512_bf16},
    {&avx512_vnni::kernel_table, has_avx512_vnni},
    {&avx512::kernel_table, has_avx512},
    {&avx2_vnni::kernel_table, has_avx2_vnni},
    {&avx2::kernel_table, has_avx2},
    {&generic::kernel_table, any_cpu},
    {&avx2_vnni_evex::kernel_table, has_avx512_vnni},
    {&emulated_avx512_bf16::kernel_table, any_cpu},
    {&emulated_amx::kernel_table, any_cpu},
};

bool runs_here(const Candidate& candidate) { return candidate.runs(cpu_info().features); }

const KernelTable* find(const std::string& name) {
    std::string available;
    for (const Candidate& candidate : kAllTables) {
        if (!runs_here(candidate)) continue;
        if (name == candidate.table->name) return candidate.table;
        available += std::string(available.empty() ? "" : ", ") + candidate.table->name;
    }
    for (const Candidate& candidate : kAllTables)
        if (name == candidate.table->name)
            throw std::invalid_argument("instruction set '" + name +
                                        "' is not available on this CPU or not enabled by its "
                                        "operating system; available: " +
                                        available);
    throw std::invalid_argument("unknown instruction set '" + name + "'; available: " + available +
                                ". Set PACE_ISA to one of them, or unset it to use the best");
}

const KernelTable* initial_table() {
    const char* forced = std::getenv("PACE_ISA");
    return forced && *forced ? find(forced) : available_isas().tables[0];
}

std::atomic<const KernelTable*> current{nullptr};

}  // namespace

const KernelTable& kernels() {
    const KernelTable* table = current.load(std::memory_order_acquire);
    if (!table) {
        table = initial_table();
        current.store(table, std::memory_order_release);
    }
    return *table;
}

void select_isa(const char* name) { current.store(find(name), std::memory_order_release); }

IsaList available_isas() {
    IsaList list = {};
    for (const Candidate& candidate : kAllTables)
        if (runs_here(candidate)) list.tables[list.count++] = candidate.table;
    return list;
}

}  // namespace pace
