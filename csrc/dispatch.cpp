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
PACE_DECLARE_TABLE(avx512)
PACE_DECLARE_TABLE(avx512_vnni)
PACE_DECLARE_TABLE(avx512_bf16)
PACE_DECLARE_TABLE(amx)
PACE_DECLARE_TABLE(emulated_avx512_bf16)
PACE_DECLARE_TABLE(emulated_amx)
#undef PACE_DECLARE_TABLE

namespace {

const KernelTable* const kAllTables[] = {
    &amx::kernel_table,  &avx512_bf16::kernel_table, &avx512_vnni::kernel_table,          &avx512::kernel_table,
    &avx2::kernel_table, &generic::kernel_table,     &emulated_avx512_bf16::kernel_table, &emulated_amx::kernel_table};

bool runs_here(const KernelTable& table) {
    const CpuFeatures& cpu = cpu_info().features;
    const bool avx2 = cpu.avx2 && cpu.fma && cpu.f16c;
    const bool avx512 = avx2 && cpu.avx512f && cpu.avx512bw && cpu.avx512dq && cpu.avx512vl;
    const bool vnni = avx512 && cpu.avx512_vnni;
    const bool bf16 = vnni && cpu.avx512_bf16;
    const bool amx = bf16 && cpu.amx_tile && cpu.amx_bf16 && cpu.amx_int8;
    const bool has_level[] = {true, avx2, avx512, vnni, bf16, amx};
    return table.emulated || has_level[table.level];
}

const KernelTable* find(const std::string& name) {
    std::string available;
    for (const KernelTable* table : kAllTables) {
        if (name == table->name && runs_here(*table)) return table;
        if (runs_here(*table)) available += std::string(available.empty() ? "" : ", ") + table->name;
    }
    for (const KernelTable* table : kAllTables)
        if (name == table->name)
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
    for (const KernelTable* table : kAllTables)
        if (runs_here(*table)) list.tables[list.count++] = table;
    return list;
}

}  // namespace pace
