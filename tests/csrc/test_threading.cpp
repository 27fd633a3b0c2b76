// The thread pool: every chunk once, phases in order, exceptions passed on, several callers and forks. Also meant to
// run under TSan.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "pace/cpu.h"
#include "pace/threading.h"

#ifdef __SANITIZE_THREAD__
// By default TSan ends a forked child that starts threads, which is what the fork test does.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace {

pace::ThreadPool& pool() { return pace::ThreadPool::instance(); }

// Plain ints on purpose: if two threads ran one chunk, or a run returned too early, TSan would report it.
std::vector<int> count_visits(int64_t chunks) {
    std::vector<int> visits(chunks, 0);
    pool().run(chunks, [&](int64_t chunk, int) { visits[chunk] += 1; });
    return visits;
}

}  // namespace

TEST(every_chunk_runs_exactly_once) {
    for (const int threads : {1, 2, 3, 7}) {
        pool().set_num_threads(threads);
        for (const int64_t chunks : {0, 1, 2, 3, 64, 1000}) {
            CHECK(count_visits(chunks) == std::vector<int>(chunks, 1));
        }
    }
}

TEST(thread_numbers_are_in_range_and_not_shared) {
    pool().set_num_threads(4);
    std::vector<std::atomic<int>> inside(4);
    std::atomic<bool> wrong{false};
    pool().run(400, [&](int64_t, int thread) {
        if (thread < 0 || thread >= 4 || inside[thread].fetch_add(1) != 0) wrong = true;
        for (int i = 0; i < 200; ++i) __asm__ volatile("" ::: "memory");
        inside[thread].fetch_sub(1);
    });
    CHECK(!wrong);
}

TEST(a_phase_sees_all_of_the_phase_before) {
    pool().set_num_threads(3);
    constexpr int kChunks = 37;
    std::vector<int64_t> values(kChunks, 1);
    std::vector<int64_t> sums(kChunks, 0);
    const auto gather = [&](int64_t chunk, int) {
        int64_t sum = 0;
        for (const int64_t value : values) sum += value;
        sums[chunk] = sum;
    };
    const auto spread = [&](int64_t chunk, int) { values[chunk] = sums[chunk] % 1000003 + chunk; };
    const auto nothing = [](int64_t, int) {};
    std::vector<pace::Phase> phases;
    for (int i = 0; i < 200; ++i) {
        phases.push_back(pace::make_phase(kChunks, gather));
        phases.push_back(pace::make_phase(0, nothing));  // an empty phase is skipped
        phases.push_back(pace::make_phase(kChunks, spread));
    }
    const std::vector<int64_t> start = values;
    pool().run(phases.data(), int(phases.size()));
    const std::vector<int64_t> parallel = values;
    values = start;
    for (int i = 0; i < 200; ++i) {
        for (int c = 0; c < kChunks; ++c) gather(c, 0);
        for (int c = 0; c < kChunks; ++c) spread(c, 0);
    }
    CHECK(values == parallel);
    pool().run(nullptr, 0);
}

// Counts calls of fetch(), by thread, and those that came after its own phase began.
struct Fetches {
    std::atomic<int> calls[2] = {}, late{0};
    std::atomic<bool> begun{false};
    void operator()(int64_t, int) const { const_cast<Fetches*>(this)->begun = true; }
    static void fetch(const void* context, int thread) {
        Fetches& self = *static_cast<Fetches*>(const_cast<void*>(context));
        self.calls[thread] += 1;
        self.late += self.begun.load();
    }
};

TEST(a_phase_is_fetched_while_the_one_before_it_runs) {
    pool().set_num_threads(2);
    // Both threads must take part of each phase.
    std::atomic<int> arrived{0};
    const auto meet = [&](int64_t, int) {
        const int turn = arrived.fetch_add(1) / 2;
        while (arrived.load() < 2 * (turn + 1)) std::this_thread::yield();
    };
    for (const int between : {0, 1, 2}) {  // phases that fetch nothing: one at most is looked over
        arrived = 0;
        Fetches last;
        std::vector<pace::Phase> phases(size_t(1 + between), pace::make_phase(2, meet));
        phases.push_back(pace::make_phase(4, last));
        phases.back().fetch = Fetches::fetch;
        pool().run(phases.data(), int(phases.size()));
        const int expected = between == 0 ? 1 : 2;
        CHECK(last.calls[0] == expected && last.calls[1] == expected);
        CHECK(last.late == 0);
    }
}

TEST(sleeping_workers_and_a_sleeping_caller_are_woken) {
    pool().set_num_threads(2);
    const auto pause = [](int64_t, int) { std::this_thread::sleep_for(std::chrono::milliseconds(3)); };
    std::atomic<int> ran{0};
    const auto count = [&](int64_t, int) { ran += 1; };
    for (int i = 0; i < 20; ++i) {
        const pace::Phase phases[] = {pace::make_phase(1, pause), pace::make_phase(50, count),
                                      pace::make_phase(2, pause), pace::make_phase(50, count)};
        pool().run(phases, 4);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(ran == 20 * 100);
}

// Phases of one chunk and of a few, in turn, while other threads compete for the processors. A thread may be suspended
// while it distributes the chunks of a phase that the others finish meanwhile. When that lost chunks, this test hung
// within seconds.
TEST(a_phase_may_end_while_its_chunks_are_being_dealt_out) {
    std::atomic<bool> over{false};
    std::vector<std::thread> busy;
    for (int i = 0; i < 3; ++i)
        busy.emplace_back([&] {
            while (!over.load(std::memory_order_relaxed)) {
            }
        });
    std::atomic<int> visits{0};
    const auto visit = [&](int64_t, int) { visits.fetch_add(1, std::memory_order_relaxed); };
    std::vector<pace::Phase> phases;
    int expected = 0;
    for (int p = 0; p < 64; ++p) {
        phases.push_back(pace::make_phase(1 + p % 2, visit));
        expected += 1 + p % 2;
    }
    for (const int threads : {2, 4}) {
        pool().set_num_threads(threads);
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
        while (std::chrono::steady_clock::now() < end) {
            visits = 0;
            pool().run(phases.data(), int(phases.size()));
            CHECK(visits == expected);
        }
    }
    over = true;
    for (std::thread& thread : busy) thread.join();
}

TEST(two_threads_really_run_at_the_same_time) {
    pool().set_num_threads(2);
    std::atomic<int> arrived{0};
    pool().run(2, [&](int64_t, int) {  // each chunk waits for the other: a single thread would never end
        arrived += 1;
        while (arrived < 2) std::this_thread::yield();
    });
    CHECK(arrived == 2);
}

TEST(the_first_error_is_rethrown_and_ends_the_run) {
    pool().set_num_threads(2);
    std::atomic<int> later{0};
    const auto fail = [](int64_t chunk, int) {
        if (chunk == 5) throw std::runtime_error("chunk five");
    };
    const auto count = [&](int64_t, int) { later += 1; };
    for (int i = 0; i < 50; ++i) {
        const pace::Phase phases[] = {pace::make_phase(8, fail), pace::make_phase(8, count)};
        std::string message;
        try {
            pool().run(phases, 2);
        } catch (const std::runtime_error& error) {
            message = error.what();
        }
        CHECK(message == "chunk five");
    }
    CHECK(later == 0);
    CHECK(count_visits(100) == std::vector<int>(100, 1));  // the pool still works
}

TEST(a_run_inside_a_chunk_is_serial) {
    pool().set_num_threads(2);
    std::vector<int> visits(40, 0);
    pool().run(4, [&](int64_t outer, int) {
        pool().run(10, [&](int64_t inner, int thread) { visits[outer * 10 + inner] += 1 + thread; });
    });
    CHECK(visits == std::vector<int>(40, 1));
    bool refused = false;
    pool().run(1, [&](int64_t, int) {
        try {
            pool().set_num_threads(3);
        } catch (const std::logic_error&) {
            refused = true;
        }
    });
    CHECK(refused);
}

TEST(callers_from_several_threads_take_turns) {
    pool().set_num_threads(2);
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 4; ++c) {
        callers.emplace_back([&] {
            for (int i = 0; i < 100; ++i) {
                if (count_visits(33) != std::vector<int>(33, 1)) wrong += 1;
            }
        });
    }
    for (int i = 0; i < 20; ++i) pool().set_num_threads(1 + i % 3);
    for (std::thread& caller : callers) caller.join();
    CHECK(wrong == 0);
}

TEST(impossible_thread_counts_are_refused) {
    for (const int count : {0, -1, pace::ThreadPool::kMaxThreads + 1}) {
        bool refused = false;
        try {
            pool().set_num_threads(count);
        } catch (const std::invalid_argument& error) {
            refused = std::string(error.what()).find(std::to_string(count)) != std::string::npos;
        }
        CHECK(refused);
    }
}

TEST(a_forked_child_has_a_working_pool) {
    pool().set_num_threads(2);
    CHECK(count_visits(64) == std::vector<int>(64, 1));
    const pid_t child = fork();
    if (child == 0) {
        const bool same_size = pool().num_threads() == 2;
        _exit(same_size && count_visits(64) == std::vector<int>(64, 1) ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(count_visits(64) == std::vector<int>(64, 1));
}

TEST(scratch_is_aligned_grows_and_belongs_to_its_thread) {
    void* const small = pace::thread_scratch(10);
    CHECK(reinterpret_cast<uintptr_t>(small) % 64 == 0);
    CHECK(pace::thread_scratch(100) == small);
    std::memset(pace::thread_scratch(1 << 20), 1, 1 << 20);
    void* const mine = pace::thread_scratch(1);
    void* other = nullptr;
    std::thread([&] { other = pace::thread_scratch(1); }).join();
    CHECK(other != mine);
}

TEST(each_thread_of_the_pool_runs_once_and_they_meet) {
    for (const int threads : {1, 2, 5}) {
        pool().set_num_threads(threads);
        for (int i = 0; i < 50; ++i) {
            count_visits(threads + i % 3);  // some threads still finish this when the next run begins
            std::vector<int> visits(threads, 0);
            pool().run_on_each([&](int thread, int count) { visits[thread] += count; });
            CHECK(visits == std::vector<int>(threads, threads));
        }
    }
    std::vector<int> visits(5, 0);
    pool().run(1, [&](int64_t, int) { pool().run_on_each([&](int thread, int) { visits[thread] += 1; }); });
    CHECK(visits == std::vector<int>(5, 1));
    bool thrown = false;
    try {
        pool().run_on_each([&](int thread, int) {
            if (thread == 3) throw std::runtime_error("three");
        });
    } catch (const std::runtime_error&) {
        thrown = true;
    }
    CHECK(thrown);
}

TEST(shares_cover_all_chunks_in_order) {
    for (const int64_t chunks : {0, 1, 7, 64}) {
        int64_t next = 0;
        for (int t = 0; t < 5; ++t) {
            const auto [first, end] = pace::ThreadPool::share(chunks, t, 5);
            CHECK(first == next && end >= first);
            next = end;
        }
        CHECK(next == chunks);
    }
}

namespace {

using Cpus = std::vector<int>;

// The processors of each thread of the pool, as the kernel reports them during a run.
std::vector<Cpus> masks_of_threads() {
    std::vector<Cpus> masks(size_t(pool().num_threads()));
    pool().run_on_each([&](int thread, int) { masks[size_t(thread)] = pace::affinity_cpus(); });
    return masks;
}

}  // namespace

TEST(pinned_threads_have_a_processor_each_and_the_caller_only_for_a_run) {
    const Cpus all = pace::affinity_cpus();
    const int count = std::min<int>(int(all.size()), 4);
    pool().set_num_threads(count, true);
    const Cpus pinned = pool().pinned_cpus();
    CHECK(int(pinned.size()) == count);
    for (int i = 0; i < 3; ++i) {
        const std::vector<Cpus> masks = masks_of_threads();
        for (int t = 0; t < count; ++t) CHECK(masks[size_t(t)] == Cpus{pinned[size_t(t)]});
        CHECK(pace::affinity_cpus() == all);
    }
    try {
        pool().run(8, [](int64_t, int) { throw std::runtime_error("any"); });
    } catch (const std::runtime_error&) {
    }
    CHECK(pace::affinity_cpus() == all);  // also after an error

    std::thread([&] {  // a caller gets its own mask back
        pace::set_affinity({all.back()});
        CHECK(masks_of_threads()[0] == Cpus{pinned[0]});
        CHECK(pace::affinity_cpus() == Cpus{all.back()});
    })
        .join();

    const pid_t child = fork();
    if (child == 0) {
        const std::vector<Cpus> masks = masks_of_threads();
        const bool same =
            pool().pinned_cpus() == pinned && masks[0] == Cpus{pinned[0]} && masks.back() == Cpus{pinned.back()};
        _exit(same && pace::affinity_cpus() == all ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);

    pool().set_num_threads(count);
    CHECK(pool().pinned_cpus().empty());
    for (const Cpus& mask : masks_of_threads()) CHECK(mask == all);
}

TEST(more_pinned_threads_than_processors_are_refused) {
    pool().set_num_threads(1);
    const int too_many = int(pace::affinity_cpus().size()) + 1;
    bool refused = false;
    try {
        pool().set_num_threads(too_many, true);
    } catch (const std::invalid_argument& error) {
        refused = std::string(error.what()).find(std::to_string(too_many) + " threads cannot") == 0;
    }
    CHECK(refused && pool().num_threads() == 1 && pool().pinned_cpus().empty());
    bool impossible = false;
    try {
        pace::set_affinity({100000});
    } catch (const std::runtime_error& error) {
        impossible = std::string(error.what()).find("CPU 100000") != std::string::npos;
    }
    CHECK(impossible);
}
