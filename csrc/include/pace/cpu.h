// What this process may use of the machine: instruction sets, processors, and the number of threads that follows.
//
// A feature counts only if the processor has it and the operating system saves its registers (XGETBV). For AMX the
// kernel must also have granted the tile state to this process. A processor counts only if it is in the affinity mask
// and the cgroup quota covers it. Two hardware threads of one core count once, because they share its FMA units.
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
    std::string model_name;  // "unknown" if /proc/cpuinfo has none
    CpuFeatures features;
    int logical_cpus = 1;        // hardware threads in the affinity mask
    int physical_cores = 1;      // cores with at least one hardware thread in the affinity mask
    int numa_nodes = 1;          // NUMA nodes that are the nearest to at least one of these CPUs
    double quota_cpus = 0.0;     // CPUs that the tightest cgroup quota allows; 0 = unlimited
    std::string quota_source;    // the file with that quota; empty = unlimited
    int default_threads = 1;     // min(physical_cores, ceil(quota_cpus))
    std::string threads_reason;  // the reason, as a sentence for `pace env`
};

// All of the above for this process, determined once at the first call, with the affinity mask at that time.
const CpuInfo& cpu_info();

// ---- The parts, for tests. `root` is prepended to every absolute path ("" is the real machine). Nothing here throws:
// ---- a file that is missing or unreadable means "no such limit".

// CPUID, XGETBV and (once, for AMX) arch_prctl on the running processor.
CpuFeatures detect_features();

// The processors of this thread's affinity mask, ascending; {0} if the kernel does not report it.
std::vector<int> affinity_cpus();

// Restricts a thread to `cpus`; the default is the calling thread. Throws std::runtime_error if the kernel refuses.
void set_affinity(const std::vector<int>& cpus);
void set_affinity(pthread_t thread, const std::vector<int>& cpus);

// "0-2,7" -> {0, 1, 2, 7}. Text that does not follow the format ends the list.
std::vector<int> parse_cpu_list(const std::string& text);

std::string read_model_name(const std::string& root);

// The number of different cores among `cpus`, from /sys/devices/system/cpu/cpu*/topology. A CPU without topology counts
// as a core.
int count_physical_cores(const std::string& root, const std::vector<int>& cpus);

// The number of NUMA nodes that `cpus` belong to; 1 if the kernel does not report it.
int count_numa_nodes(const std::string& root, const std::vector<int>& cpus);

// The processors on which `count` threads are pinned: separate cores first, then second hardware threads, in the order
// of the nodes. The result is sorted by node, so that neighbouring threads share one. Throws std::invalid_argument if
// there are more threads than `cpus`.
std::vector<int> cpus_to_pin(const std::string& root, const std::vector<int>& cpus, int count);

struct CpuQuota {
    double cpus = 0.0;   // 0 = unlimited
    std::string source;  // the file with the tightest limit
};

// The tightest CPU quota among this process's cgroup and all its mounted ancestors, for cgroup v1 and v2.
CpuQuota read_cpu_quota(const std::string& root);

// All of CpuInfo except the features, read from `root`, for a process that may use `cpus`.
CpuInfo describe_cpus(const std::string& root, const std::vector<int>& cpus);

}  // namespace pace
