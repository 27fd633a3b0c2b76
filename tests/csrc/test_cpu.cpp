// Tests the parsing of /proc and /sys in cpu.cpp, on made-up trees.
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "pace/cpu.h"

namespace {

using Cpus = std::vector<int>;

// A directory that serves as the root of a machine; files are added by their absolute path.
class FakeRoot {
  public:
    FakeRoot() {
        char pattern[] = "/tmp/pace-cpu-XXXXXX";
        const char* made = mkdtemp(pattern);
        path_ = made == nullptr ? "/nonexistent" : made;
    }
    ~FakeRoot() {
        if (std::system(("rm -rf '" + path_ + "'").c_str()) != 0) std::perror("rm");
    }
    void write(const std::string& file, const std::string& text) const {
        for (size_t slash = file.find('/', 1); slash != std::string::npos; slash = file.find('/', slash + 1)) {
            mkdir((path_ + file.substr(0, slash)).c_str(), 0755);
        }
        std::ofstream(path_ + file) << text;
    }
    const std::string& path() const { return path_; }

  private:
    std::string path_;
};

const char* const kMountV2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
const char* const kMountV1 =
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";

void write_siblings(const FakeRoot& root, int cpu, const std::string& siblings, const char* file = "core_cpus_list") {
    root.write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + file, siblings + "\n");
}

}  // namespace

TEST(cpu_lists_are_ranges_and_single_numbers) {
    CHECK(pace::parse_cpu_list("0-2,7") == (Cpus{0, 1, 2, 7}));
    CHECK(pace::parse_cpu_list("3\n") == (Cpus{3}));
    CHECK(pace::parse_cpu_list("").empty());
    CHECK(pace::parse_cpu_list("x").empty());
    CHECK(pace::parse_cpu_list("1,5-3,9") == (Cpus{1}));
    CHECK(pace::parse_cpu_list("0-2000000000").empty());
}

TEST(two_hardware_threads_of_a_core_count_once) {
    const FakeRoot root;
    write_siblings(root, 0, "0,4");
    write_siblings(root, 4, "0,4");
    write_siblings(root, 1, "1,5");
    write_siblings(root, 2, "2-3", "thread_siblings_list");  // the file name in older kernels
    write_siblings(root, 3, "2-3", "thread_siblings_list");
    CHECK(pace::count_physical_cores(root.path(), {0, 1, 2, 3, 4}) == 3);
    CHECK(pace::count_physical_cores(root.path(), {4}) == 1);     // the sibling is outside the mask
    CHECK(pace::count_physical_cores(root.path(), {8, 9}) == 2);  // no topology
}

TEST(threads_are_pinned_to_cores_first_and_neighbours_share_a_node) {
    const FakeRoot root;  // 2 nodes of 2 cores with 2 hardware threads; even cores on node 0, as on some machines
    for (int cpu = 0; cpu < 8; ++cpu)
        write_siblings(root, cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
    root.write("/sys/devices/system/node/online", "0-1\n");
    root.write("/sys/devices/system/node/node0/cpulist", "0,2,4,6\n");
    root.write("/sys/devices/system/node/node1/cpulist", "1,3,5,7\n");
    const Cpus all{0, 1, 2, 3, 4, 5, 6, 7};
    const auto pinned = [&](const Cpus& cpus, int count) { return pace::cpus_to_pin(root.path(), cpus, count); };
    CHECK(pinned(all, 2) == (Cpus{0, 2}));
    CHECK(pinned(all, 4) == (Cpus{0, 2, 1, 3}));
    CHECK(pinned(all, 5) == (Cpus{0, 2, 4, 1, 3}));
    CHECK(pinned(all, 8) == (Cpus{0, 2, 4, 6, 1, 3, 5, 7}));
    CHECK(pinned({1, 5, 6, 7}, 3) == (Cpus{6, 1, 7}));  // only CPUs in the mask are used
    CHECK(pace::count_numa_nodes(root.path(), all) == 2);
    CHECK(pace::count_numa_nodes(root.path(), {1, 3}) == 1);
    CHECK(pace::describe_cpus(root.path(), all).numa_nodes == 2);
    bool refused = false;
    try {
        pinned({1, 5}, 3);
    } catch (const std::invalid_argument& error) {
        refused = std::string(error.what()).find("3 threads") == 0;
    }
    CHECK(refused);
}

TEST(without_topology_every_processor_is_a_core_of_one_node) {
    const FakeRoot root;
    CHECK(pace::cpus_to_pin(root.path(), {3, 5, 9}, 2) == (Cpus{3, 5}));
    CHECK(pace::count_numa_nodes(root.path(), {3, 5, 9}) == 1);
}

TEST(model_name_is_read_or_unknown) {
    const FakeRoot root;
    CHECK(pace::read_model_name(root.path()) == "unknown");
    root.write("/proc/cpuinfo", "processor\t: 0\nmodel\t\t: 2\nmodel name\t: Some CPU @ 3 GHz\nflags : fpu\n");
    CHECK(pace::read_model_name(root.path()) == "Some CPU @ 3 GHz");
}

TEST(no_cgroup_files_mean_no_quota) {
    const FakeRoot root;
    CHECK(pace::read_cpu_quota(root.path()).cpus == 0);
}

TEST(cgroup_v2_takes_the_tightest_ancestor) {
    const FakeRoot root;
    root.write("/proc/self/mountinfo", kMountV2);
    root.write("/proc/self/cgroup", "0::/a/b\n");
    root.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 0);
    root.write("/sys/fs/cgroup/a/cpu.max", "150000 100000\n");
    const pace::CpuQuota quota = pace::read_cpu_quota(root.path());
    CHECK(quota.cpus == 1.5);
    CHECK(quota.source == "/sys/fs/cgroup/a/cpu.max");
    root.write("/sys/fs/cgroup/a/b/cpu.max", "50000 100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 0.5);
}

TEST(cgroup_v2_in_a_container_whose_path_is_the_hosts) {
    const FakeRoot root;
    root.write("/proc/self/mountinfo", "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    root.write("/proc/self/cgroup", "0::/docker/abc\n");
    root.write("/sys/fs/cgroup/cpu.max", "400000 100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 4.0);
    root.write("/proc/self/cgroup", "0::/../other\n");  // moved outside the namespace's root
    CHECK(pace::read_cpu_quota(root.path()).cpus == 4.0);
}

TEST(cgroup_v1_uses_the_cpu_controller_only) {
    const FakeRoot root;
    root.write("/proc/self/mountinfo", kMountV1);
    root.write("/proc/self/cgroup", "5:cpuset:/job\n4:cpu,cpuacct:/job\n0::/\n");
    root.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
    root.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    root.write("/sys/fs/cgroup/cpuset/job/cpu.cfs_quota_us", "1000\n");
    root.write("/sys/fs/cgroup/cpuset/job/cpu.cfs_period_us", "100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 0);
    root.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "250000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 2.5);
}

TEST(cgroup_v1_takes_the_tightest_ancestor) {
    const FakeRoot root;
    const std::string mount = "/sys/fs/cgroup/cpu,cpuacct";
    root.write("/proc/self/mountinfo", kMountV1);
    root.write("/proc/self/cgroup", "4:cpu,cpuacct:/slice/job/task\n");
    const auto limit = [&](const std::string& group, const std::string& quota) {
        root.write(mount + group + "/cpu.cfs_quota_us", quota + "\n");
        root.write(mount + group + "/cpu.cfs_period_us", "50000\n");
    };
    limit("/slice/job/task", "-1");
    limit("/slice/job", "200000");
    limit("/slice", "75000");
    limit("", "-1");
    const pace::CpuQuota quota = pace::read_cpu_quota(root.path());
    CHECK(quota.cpus == 1.5);
    CHECK(quota.source == mount + "/slice/cpu.cfs_quota_us");
    limit("/slice/job/task", "25000");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 0.5);
}

TEST(cgroup_v1_in_a_container_whose_path_is_the_hosts) {
    const FakeRoot root;
    root.write("/proc/self/mountinfo", "33 31 0:30 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n");
    root.write("/proc/self/cgroup", "4:cpu:/docker/abc\n");
    root.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000\n");
    root.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 3.0);
}

TEST(where_both_cgroup_versions_are_mounted_the_tighter_counts) {
    const FakeRoot root;  // systemd's hybrid mode: v2 without controllers next to v1 with all of them
    root.write("/proc/self/mountinfo",
               std::string(kMountV1) + "40 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    root.write("/proc/self/cgroup", "4:cpu,cpuacct:/job\n0::/job\n");
    root.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "400000\n");
    root.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 4.0);
    root.write("/sys/fs/cgroup/unified/job/cpu.max", "100000 100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 1.0);
}

TEST(damaged_cgroup_files_mean_no_quota) {
    const FakeRoot root;
    root.write("/proc/self/mountinfo", kMountV2);
    root.write("/proc/self/cgroup", "0::/a\n");
    for (const char* text : {"", "max", "100000", "x y", "-5 100000", "100000 0"}) {
        root.write("/sys/fs/cgroup/a/cpu.max", text);
        CHECK(pace::read_cpu_quota(root.path()).cpus == 0);
    }
}

TEST(mount_points_may_hold_spaces) {
    const FakeRoot root;
    root.write("/proc/self/mountinfo", "30 23 0:26 / /c\\040g rw - cgroup2 cgroup2 rw\n");
    root.write("/proc/self/cgroup", "0::/\n");
    root.write("/c g/cpu.max", "200000 100000\n");
    CHECK(pace::read_cpu_quota(root.path()).cpus == 2.0);
}

TEST(default_threads_are_cores_or_the_quota_rounded_up) {
    const FakeRoot root;
    for (int cpu = 0; cpu < 8; ++cpu)
        write_siblings(root, cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
    const Cpus all{0, 1, 2, 3, 4, 5, 6, 7};
    CHECK(pace::describe_cpus(root.path(), all).default_threads == 4);
    root.write("/proc/self/mountinfo", kMountV2);
    root.write("/proc/self/cgroup", "0::/\n");
    root.write("/sys/fs/cgroup/cpu.max", "220000 100000\n");
    const pace::CpuInfo limited = pace::describe_cpus(root.path(), all);
    CHECK(limited.default_threads == 3);
    CHECK(limited.logical_cpus == 8);
    CHECK(limited.physical_cores == 4);
    CHECK(limited.threads_reason.find("quota of 2.2") != std::string::npos);
    root.write("/sys/fs/cgroup/cpu.max", "1600000 100000\n");  // more than the number of cores
    CHECK(pace::describe_cpus(root.path(), all).default_threads == 4);
    CHECK(pace::describe_cpus(root.path(), {1, 5}).default_threads == 1);
}

TEST(this_machine_is_described) {
    const pace::CpuInfo& info = pace::cpu_info();
    CHECK(info.default_threads >= 1 && info.default_threads <= info.physical_cores);
    CHECK(info.physical_cores <= info.logical_cpus);
    CHECK(!info.threads_reason.empty());
    CHECK(info.features.avx2 == bool(__builtin_cpu_supports("avx2")));
    CHECK(info.features.fma == bool(__builtin_cpu_supports("fma")));
    CHECK(info.features.avx_vnni == bool(__builtin_cpu_supports("avxvnni")));
    CHECK(info.features.avx512f == bool(__builtin_cpu_supports("avx512f")));
    CHECK(info.features.avx512_vnni == bool(__builtin_cpu_supports("avx512vnni")));
    CHECK(info.features.avx512_bf16 == bool(__builtin_cpu_supports("avx512bf16")));
}
