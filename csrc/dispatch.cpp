// Picks the kernel table, once. PACE_ISA forces one; an unknown name is an error.
//
// A build may leave tables out (PACE_TABLES in CMakeLists.txt). Their symbols are weak, so the address of a table that
// was not linked is null.
#include "pace/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "pace/cpu.h"

namespace pace {

#define PACE_DECLARE_TABLE(isa)                          \
    namespace isa {                                      \
    [[gnu::weak]] extern const KernelTable kernel_table; \
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
    const char* name;
    const KernelTable* table;  // null if it was not built
    bool (*runs)(const CpuFeatures&);
    const char* build = "all";  // value of PACE_TABLES for a build that has it
    bool runs_here() const { return runs(cpu_info().features); }
};

// The first table that this CPU can run is chosen. Tables after `generic` are only for tests: wheels do not have them.
const Candidate kAllTables[] = {
    {"amx", &amx::kernel_table, has_amx},
    {"avx512_bf16", &avx512_bf16::kernel_table, has_avx512_bf16},
    {"avx512_vnni", &avx512_vnni::kernel_table, has_avx512_vnni},
    {"avx512", &avx512::kernel_table, has_avx512},
    {"avx2_vnni", &avx2_vnni::kernel_table, has_avx2_vnni},
    {"avx2", &avx2::kernel_table, has_avx2},
    {"generic", &generic::kernel_table, any_cpu},
    {"avx2_vnni_evex", &avx2_vnni_evex::kernel_table, has_avx512_vnni, "tests"},
    {"emulated_avx512_bf16", &emulated_avx512_bf16::kernel_table, any_cpu, "tests"},
    {"emulated_amx", &emulated_amx::kernel_table, any_cpu, "tests"},
};

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

const KernelTable* find(const std::string& name) {
    for (const Candidate& candidate : kAllTables) {
        if (name != candidate.name) continue;
        if (!candidate.runs_here())
            throw std::invalid_argument("instruction set '" + name +
                                        "' is not available on this CPU or not enabled by its "
                                        "operating system; available: " +
                                        joined(available_isas()));
        if (!candidate.table)
            throw std::invalid_argument("instruction set '" + name + "' is not in this build of pace, which has: " +
                                        joined(built_isas()) + ". Build it with PACE_TABLES=" + candidate.build);
        return candidate.table;
    }
    throw std::invalid_argument("unknown instruction set '" + name + "'; available: " + joined(available_isas()) +
                                ". Set PACE_ISA to one of them, or unset it to use the best");
}

const KernelTable* initial_table() {
    const char* forced = std::getenv("PACE_ISA");
    return find(forced && *forced ? forced : available_isas().front());
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

void select_isa(const std::string& name) { current.store(find(name), std::memory_order_release); }

std::vector<std::string> built_isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : kAllTables)
        if (candidate.table) names.push_back(candidate.name);
    return names;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : kAllTables)
        if (candidate.table && candidate.runs_here()) names.push_back(candidate.name);
    return names;
}

const char* best_isa() {
    for (const Candidate& candidate : kAllTables)
        if (candidate.runs_here()) return candidate.name;
    return "generic";
}

}  // namespace pace
