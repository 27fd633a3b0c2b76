// What this process may use of the machine: instruction sets, processors, and how many threads follow from them.
//
// A feature counts only when the processor has it, the operating system saves its registers (XGETBV) and, for AMX, the
// kernel has granted the tile state to this process. A processor counts only when the affinity mask holds it and the
// cgroup quota pays for it; two hardware threads of one core count once, because they share its FMA units.
#pragma once

#include <pthread.h>

#include <string>
#include <vector>

namespace pace {

struct CpuFeatures {
    bool avx2 = false;  // AVX2 with usable YMM state
    bool fma = false;
    bool f16c = false;
    bool avx512f = false;  // AVX-512 flags imply usable ZMM and mask state
    bool avx512bw = false;
    bool avx512dq = false;
    bool avx512vl = false;
    bool avx512_vnni = false;
    bool avx512_bf16 = false;
    bool avx_vnni = false;  // the VEX-encoded VNNI of processors without AVX-512
    bool amx_tile = false;  // AMX flags imply that the kernel granted the tile state
    bool amx_bf16 = false;
    bool amx_int8 = false;

    // "avx2 fma f16c ...": the names of the features that are true, in the order above.
    std::string names() const;
};

struct CpuInfo {
    std::string model_name;  // "unknown" where /proc/cpuinfo has none
    CpuFeatures features;
    int logical_cpus = 1;        // hardware threads in the affinity mask
    int physical_cores = 1;      // cores with at least one hardware thread in the affinity mask
    int numa_nodes = 1;          // memories to which at least one of these is the nearest
    double quota_cpus = 0.0;     // CPUs that the tightest cgroup pays for; 0 = unlimited
    std::string quota_source;    // the file that said so; empty = unlimited
    int default_threads = 1;     // min(physical_cores, ceil(quota_cpus))
    std::string threads_reason;  // why, in a sentence for `pace env`
};

// Everything above for this process, found once at the first call. The affinity mask is the one of that moment.
const CpuInfo& cpu_info();

// ---- The parts, for tests. `root` is put before every absolute path ("" is the real machine). Nothing here throws:
// ---- a file that is missing or unreadable means "no such limit".

// CPUID, XGETBV and (once, for AMX) arch_prctl of the running processor.
CpuFeatures detect_features();

// The processors of this thread's affinity mask, ascending; {0} where the kernel does not tell.
std::vector<int> affinity_cpus();

// Confines a thread to `cpus`, by default the calling one. Throws std::runtime_error where the kernel refuses.
void set_affinity(const std::vector<int>& cpus);
void set_affinity(pthread_t thread, const std::vector<int>& cpus);

// "0-2,7" -> {0, 1, 2, 7}. Text that does not follow the format ends the list.
std::vector<int> parse_cpu_list(const std::string& text);

std::string read_model_name(const std::string& root);

// The number of different cores among `cpus`, by /sys/devices/system/cpu/cpu*/topology; a CPU without topology is a
// core.
int count_physical_cores(const std::string& root, const std::vector<int>& cpus);

// The number of nodes that the memory of a machine falls into, seen from `cpus`; 1 where the kernel does not tell.
int count_numa_nodes(const std::string& root, const std::vector<int>& cpus);

// Where `count` threads are pinned: cores of their own as long as there are some, then the second hardware threads, in
// the order of the nodes; the result is sorted by node, so that neighbouring threads share one. Throws
// std::invalid_argument where there are more threads than `cpus`.
std::vector<int> cpus_to_pin(const std::string& root, const std::vector<int>& cpus, int count);

struct CpuQuota {
    double cpus = 0.0;   // 0 = unlimited
    std::string source;  // the file with the tightest limit
};

// The tightest CPU quota of this process's cgroup and all its ancestors that are mounted, cgroup v1 and v2 alike.
CpuQuota read_cpu_quota(const std::string& root);

// All of CpuInfo but the features, from `root`, for a process that may use `cpus`.
CpuInfo describe_cpus(const std::string& root, const std::vector<int>& cpus);

}  // namespace pace
