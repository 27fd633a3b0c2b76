#include "pace/cpu.h"

#include <cpuid.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "pace/prefetch.h"

namespace pace {

// ---------------------------------------------------------------------------------------------------------------------
// Instruction sets
// ---------------------------------------------------------------------------------------------------------------------

namespace {

struct CpuidResult {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;  // all zero where the leaf does not exist
};

CpuidResult cpuid(uint32_t leaf, uint32_t subleaf) {
    CpuidResult result;
    if (!__get_cpuid_count(leaf, subleaf, &result.eax, &result.ebx, &result.ecx, &result.edx)) return {};
    return result;
}

bool bit(uint32_t word, int position) { return (word >> position) & 1; }

// XCR0: which register states the operating system saves. Call it only if CPUID reports OSXSAVE.
uint64_t read_xcr0() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

// Asks Linux to let this process use AMX tile data; threads created later inherit the permission.
bool request_amx_permission() {
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// AMD's Zen 5 and later.
bool is_zen5() {
    constexpr uint32_t kFirstLetters = 0x68747541, kExtended = 15, kZen5 = 26;  // "Auth"
    const uint32_t version = cpuid(1, 0).eax, family = version >> 8 & 15;
    return cpuid(0, 0).ebx == kFirstLetters && family == kExtended && family + (version >> 20 & 255) >= kZen5;
}

}  // namespace

const bool kPrefetchesOneRow = is_zen5();

CpuFeatures detect_features() {
    CpuFeatures features;
    const CpuidResult leaf1 = cpuid(1, 0);
    const bool os_saves_extended_state = bit(leaf1.ecx, 27);
    if (!os_saves_extended_state) return features;

    // State bits of XCR0: 1 SSE, 2 YMM, 5-7 masks and ZMM, 17-18 AMX.
    const uint64_t xcr0 = read_xcr0();
    const bool ymm_state = (xcr0 & 0x6) == 0x6;
    const bool zmm_state = (xcr0 & 0xE6) == 0xE6;
    const bool tile_state = (xcr0 & 0x60000) == 0x60000;
    const CpuidResult leaf7 = cpuid(7, 0);
    const CpuidResult leaf7_1 = leaf7.eax >= 1 ? cpuid(7, 1) : CpuidResult{};

    if (ymm_state && bit(leaf1.ecx, 28)) {
        features.avx2 = bit(leaf7.ebx, 5);
        features.fma = bit(leaf1.ecx, 12);
        features.f16c = bit(leaf1.ecx, 29);
        features.avx_vnni = bit(leaf7_1.eax, 4);
    }
    if (zmm_state && bit(leaf7.ebx, 16)) {
        features.avx512f = true;
        features.avx512dq = bit(leaf7.ebx, 17);
        features.avx512bw = bit(leaf7.ebx, 30);
        features.avx512vl = bit(leaf7.ebx, 31);
        features.avx512_vnni = bit(leaf7.ecx, 11);
        features.avx512_bf16 = bit(leaf7_1.eax, 5);
    }
    if (tile_state && bit(leaf7.edx, 24) && request_amx_permission()) {
        features.amx_tile = true;
        features.amx_bf16 = bit(leaf7.edx, 22);
        features.amx_int8 = bit(leaf7.edx, 25);
    }
    return features;
}

std::string CpuFeatures::names() const {
    const std::pair<bool, const char*> all[] = {
        {avx2, "avx2"},
        {fma, "fma"},
        {f16c, "f16c"},
        {avx512f, "avx512f"},
        {avx512bw, "avx512bw"},
        {avx512dq, "avx512dq"},
        {avx512vl, "avx512vl"},
        {avx512_vnni, "avx512_vnni"},
        {avx512_bf16, "avx512_bf16"},
        {avx_vnni, "avx_vnni"},
        {amx_tile, "amx_tile"},
        {amx_bf16, "amx_bf16"},
        {amx_int8, "amx_int8"},
    };
    std::string text;
    for (const auto& [present, name] : all) {
        if (!present) continue;
        if (!text.empty()) text += ' ';
        text += name;
    }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// Processors
// ---------------------------------------------------------------------------------------------------------------------

std::vector<int> affinity_cpus() {
    // The kernel refuses a mask smaller than its own, so the buffer grows until it is large enough.
    for (int capacity = 1024; capacity <= (1 << 20); capacity *= 2) {
        cpu_set_t* mask = CPU_ALLOC(capacity);
        if (mask == nullptr) break;
        const size_t bytes = CPU_ALLOC_SIZE(capacity);
        CPU_ZERO_S(bytes, mask);
        const bool fits = sched_getaffinity(0, bytes, mask) == 0;
        std::vector<int> cpus;
        for (int cpu = 0; fits && cpu < capacity; ++cpu) {
            if (CPU_ISSET_S(cpu, bytes, mask)) cpus.push_back(cpu);
        }
        CPU_FREE(mask);
        if (!cpus.empty()) return cpus;
    }
    return {0};
}

void set_affinity(const std::vector<int>& cpus) { set_affinity(pthread_self(), cpus); }

void set_affinity(pthread_t thread, const std::vector<int>& cpus) {
    const int capacity = cpus.empty() ? 1 : *std::max_element(cpus.begin(), cpus.end()) + 1;
    cpu_set_t* const mask = CPU_ALLOC(capacity);
    if (mask == nullptr) throw std::bad_alloc();
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    CPU_ZERO_S(bytes, mask);
    for (const int cpu : cpus) CPU_SET_S(cpu, bytes, mask);
    const int error = pthread_setaffinity_np(thread, bytes, mask);
    CPU_FREE(mask);
    if (error != 0) {
        std::ostringstream message;
        message << "a thread cannot be confined to CPU";
        for (const int cpu : cpus) message << ' ' << cpu;
        throw std::runtime_error(message.str() + ": " + std::strerror(error));
    }
}

std::vector<int> parse_cpu_list(const std::string& text) {
    constexpr int kMaxCpu = 1 << 20;  // a hostile "0-2000000000" must not fill the memory
    std::vector<int> cpus;
    std::istringstream ranges(text);
    std::string range;
    while (std::getline(ranges, range, ',')) {
        int first = 0, last = 0;
        const int fields = std::sscanf(range.c_str(), "%d-%d", &first, &last);
        if (fields < 1) break;
        if (fields == 1) last = first;
        if (first < 0 || last < first || last > kMaxCpu) break;
        for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    }
    return cpus;
}

std::string read_model_name(const std::string& root) {
    std::ifstream file(root + "/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line)) {
        if (line.rfind("model name", 0) != 0) continue;
        const size_t colon = line.find(':');
        const size_t start = colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
        if (start != std::string::npos) return line.substr(start);
    }
    return "unknown";
}

namespace {

// The core of a processor, identified by its lowest hardware thread.
int core_of(const std::string& root, int cpu) {
    const std::string topology = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {  // the second is the older name
        std::ifstream file(topology + name);
        std::string text;
        if (!std::getline(file, text)) continue;
        const std::vector<int> siblings = parse_cpu_list(text);
        if (!siblings.empty()) return *std::min_element(siblings.begin(), siblings.end());
    }
    return cpu;
}

// Processor -> its NUMA node; processors for which the kernel reports none are missing.
std::map<int, int> numa_node_of_cpus(const std::string& root) {
    const std::string nodes = root + "/sys/devices/system/node/";
    std::map<int, int> node_of;
    std::string text;
    std::ifstream online(nodes + "online");
    if (!std::getline(online, text)) return node_of;
    for (const int node : parse_cpu_list(text)) {
        std::ifstream file(nodes + "node" + std::to_string(node) + "/cpulist");
        if (!std::getline(file, text)) continue;
        for (const int cpu : parse_cpu_list(text)) node_of[cpu] = node;
    }
    return node_of;
}

}  // namespace

int count_physical_cores(const std::string& root, const std::vector<int>& cpus) {
    std::set<int> cores;
    for (const int cpu : cpus) cores.insert(core_of(root, cpu));
    return std::max<int>(1, int(cores.size()));
}

int count_numa_nodes(const std::string& root, const std::vector<int>& cpus) {
    std::map<int, int> node_of = numa_node_of_cpus(root);
    std::set<int> nodes;
    for (const int cpu : cpus) nodes.insert(node_of[cpu]);
    return std::max<int>(1, int(nodes.size()));
}

std::vector<int> cpus_to_pin(const std::string& root, const std::vector<int>& cpus, int count) {
    if (count > int(cpus.size())) {
        throw std::invalid_argument(
            std::to_string(count) + " threads cannot each have a CPU of their own: the affinity mask holds " +
            std::to_string(cpus.size()) + "; take fewer threads, widen the mask, or do not pin them");
    }
    struct Place {
        int sibling, node, cpu;  // number of earlier hardware threads of the same core
    };
    std::map<int, int> node_of = numa_node_of_cpus(root), taken;
    std::vector<Place> places;
    for (const int cpu : cpus) places.push_back({taken[core_of(root, cpu)]++, node_of[cpu], cpu});
    const auto chosen = places.begin() + count;
    std::sort(places.begin(), places.end(),
              [](Place a, Place b) { return std::tie(a.sibling, a.node, a.cpu) < std::tie(b.sibling, b.node, b.cpu); });
    std::sort(places.begin(), chosen,
              [](Place a, Place b) { return std::tie(a.node, a.cpu) < std::tie(b.node, b.cpu); });
    std::vector<int> pinned;
    for (auto place = places.begin(); place != chosen; ++place) pinned.push_back(place->cpu);
    return pinned;
}

// ---------------------------------------------------------------------------------------------------------------------
// The cgroup quota
// ---------------------------------------------------------------------------------------------------------------------

namespace {

struct CgroupMount {
    std::string mount_point;  // directory at which the hierarchy is visible
    std::string mount_root;   // cgroup that appears at the mount point
};

bool has_item(const std::string& comma_separated, const std::string& item) {
    return ("," + comma_separated + ",").find("," + item + ",") != std::string::npos;
}

// mountinfo writes space, tab, newline and backslash as \040, \011, \012 and \134.
std::string decode_octal(const std::string& text) {
    std::string decoded;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '\\' && i + 3 < text.size()) {
            decoded += char(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
            i += 3;
        } else {
            decoded += text[i];
        }
    }
    return decoded;
}

// Finds cgroup mounts. A line of mountinfo has id, parent, device, root, mount point, options, optional fields, "-",
// type, source and super options.
std::vector<CgroupMount> find_cgroup_mounts(const std::string& root, bool v2) {
    std::vector<CgroupMount> mounts;
    std::ifstream file(root + "/proc/self/mountinfo");
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        std::string id, parent, device, mount_root, mount_point, field, type, source, super_options;
        fields >> id >> parent >> device >> mount_root >> mount_point;
        while (fields >> field && field != "-") {
        }
        fields >> type >> source >> super_options;
        const bool wanted = v2 ? type == "cgroup2" : type == "cgroup" && has_item(super_options, "cpu");
        if (wanted) mounts.push_back({decode_octal(mount_point), decode_octal(mount_root)});
    }
    return mounts;
}

// The path of this process's cgroup in the v2 hierarchy ("0::/path") or in the v1 hierarchy of the cpu controller.
bool find_cgroup_path(const std::string& root, bool v2, std::string* path) {
    std::ifstream file(root + "/proc/self/cgroup");
    std::string line;
    while (std::getline(file, line)) {
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        if (v2 ? controllers.empty() : has_item(controllers, "cpu")) {
            *path = line.substr(second + 1);
            return true;
        }
    }
    return false;
}

// CPUs that one cgroup directory allows; 0 = unlimited or unspecified. `source` becomes the file that was read.
double read_quota_of(const std::string& directory, bool v2, std::string* source) {
    double quota = 0.0, period = 0.0;
    if (v2) {
        *source = directory + "/cpu.max";
        std::ifstream file(*source);
        std::string quota_text;  // "max" or microseconds
        if (!(file >> quota_text >> period) || quota_text == "max") return 0.0;
        quota = std::atof(quota_text.c_str());
    } else {
        *source = directory + "/cpu.cfs_quota_us";
        std::ifstream quota_file(*source);
        std::ifstream period_file(directory + "/cpu.cfs_period_us");
        if (!(quota_file >> quota) || !(period_file >> period)) return 0.0;
    }
    return quota > 0 && period > 0 ? quota / period : 0.0;  // v1 writes -1 for unlimited
}

}  // namespace

CpuQuota read_cpu_quota(const std::string& root) {
    CpuQuota tightest;
    for (const bool v2 : {false, true}) {
        std::string path;
        if (!find_cgroup_path(root, v2, &path)) continue;
        for (const CgroupMount& mount : find_cgroup_mounts(root, v2)) {
            // The part of the path below the mounted directory. A container may see its own cgroup as the mount's root,
            // while /proc names it from the host's root, or from outside ("/../x"). Then only the mount point is
            // usable.
            const std::string prefix = mount.mount_root == "/" ? std::string() : mount.mount_root;
            const bool visible = path.rfind(prefix + "/", 0) == 0 && path.find("/..") == std::string::npos;
            std::string below = visible ? path.substr(prefix.size()) : "";
            while (!below.empty() && below.back() == '/') below.pop_back();
            for (;;) {  // this cgroup, then its parents up to the mount point
                std::string source;
                const double cpus = read_quota_of(root + mount.mount_point + below, v2, &source);
                if (cpus > 0 && (tightest.cpus == 0 || cpus < tightest.cpus)) {
                    tightest = {cpus, source.substr(root.size())};
                }
                if (below.empty()) break;
                below.resize(below.rfind('/'));
            }
        }
    }
    return tightest;
}

// ---------------------------------------------------------------------------------------------------------------------
// Summary
// ---------------------------------------------------------------------------------------------------------------------

CpuInfo describe_cpus(const std::string& root, const std::vector<int>& cpus) {
    CpuInfo info;
    info.model_name = read_model_name(root);
    info.logical_cpus = std::max<int>(1, int(cpus.size()));
    info.physical_cores = count_physical_cores(root, cpus);
    info.numa_nodes = count_numa_nodes(root, cpus);
    const CpuQuota quota = read_cpu_quota(root);
    info.quota_cpus = quota.cpus;
    info.quota_source = quota.source;

    std::ostringstream reason;
    const double paid = std::ceil(quota.cpus);  // 0.5 CPUs still need one thread, 2.5 CPUs can feed three
    if (quota.cpus > 0 && paid < info.physical_cores) {
        info.default_threads = int(paid);
        reason << "cgroup quota of " << quota.cpus << " CPUs (" << quota.source << ") on " << info.physical_cores
               << " physical cores";
    } else {
        info.default_threads = info.physical_cores;
        reason << info.physical_cores << " physical cores within the affinity mask of " << info.logical_cpus
               << " hardware threads";
        if (quota.cpus > 0) reason << ", cgroup quota of " << quota.cpus << " CPUs";
    }
    info.threads_reason = reason.str();
    return info;
}

const CpuInfo& cpu_info() {
    static const CpuInfo info = [] {
        CpuInfo found = describe_cpus("", affinity_cpus());
        found.features = detect_features();
        return found;
    }();
    return info;
}

}  // namespace pace
