// The only place with threads: a pool that runs phases of independent chunks.
//
//   phase 0: chunks 0..n0-1   |barrier|   phase 1: chunks 0..n1-1   |barrier| ...
//
// Each thread takes the chunks of its own range one by one, in order, and then the chunks that others have left. So a
// thread reads memory in one stream, and a slow or shared core takes fewer chunks. A barrier waits for chunks, never
// for threads: a worker that the operating system suspends between two chunks delays no other thread. Results must not
// depend on which thread runs a chunk; kernels guarantee that by construction.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace pace {

// One phase: body(context, chunk, thread) for chunk in [0, chunks), at most 2^32 - 1 of them. `thread` is in [0,
// num_threads) and unique among the threads that are inside this run at the same time.
//
// `fetch`, if not null, fetches into the caches what `thread` will read first in this phase. Each thread calls it before
// the last chunk of its range in an earlier phase, so it must not read what a run writes.
struct Phase {
    int64_t chunks;
    void (*body)(const void* context, int64_t chunk, int thread);
    const void* context;
    void (*fetch)(const void* context, int thread) = nullptr;
};

// A phase from any callable f(chunk, thread). `f` must outlive the run.
template <class F>
Phase make_phase(int64_t chunks, const F& f) {
    return {chunks,
            [](const void* context, int64_t chunk, int thread) { (*static_cast<const F*>(context))(chunk, thread); },
            &f, nullptr};
}

class ThreadPool {
    struct State;

  public:
    // The pool of the process. It starts with one thread; the first run that can use workers creates them. A child
    // after fork() gets a fresh pool of the same size.
    static ThreadPool& instance();

    // Sets the number of threads in a run, the caller included. Waits for runs in flight, then joins the old workers.
    // With `pinned`, each thread runs on a separate processor (cpus_to_pin of cpu.h, within the calling thread's
    // affinity mask). The caller is pinned only during a run and gets its own mask back afterwards. Throws
    // std::invalid_argument outside 1..kMaxThreads, or for more pinned threads than processors, and std::logic_error
    // from inside a chunk.
    void set_num_threads(int count, bool pinned = false);
    int num_threads() const;
    std::vector<int> pinned_cpus() const;  // by thread; empty if threads are not pinned
    static constexpr int kMaxThreads = 4096;

    // Runs the phases in order and returns when the last chunk is done; the caller works too. Callers from several
    // threads take turns. If called from inside a chunk, the phases run on the calling thread only (thread = 0). If a
    // chunk throws, no further chunk is begun. The first exception is rethrown here when all begun chunks have ended.
    // If `opened` is given, opened[p] becomes the time at which phase p was opened, in nanoseconds of a steady clock.
    // opened[count] is the time of the end (count + 1 entries).
    void run(const Phase* phases, int count, int64_t* opened = nullptr);

    // A caller's turn, for work that must happen together with a run. Until it is destroyed, other callers wait, and so
    // does a fork(). So a child never sees guarded data half changed. Inside a chunk a turn does not wait.
    class Turn {
      public:
        explicit Turn(ThreadPool& pool);
        void run(const Phase* phases, int count, int64_t* opened = nullptr);  // as ThreadPool::run
        bool is_serial() const { return state_ == nullptr; }
        ~Turn();
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

      private:
        State* const state_;  // null inside a chunk
    };

    template <class F, class = std::enable_if_t<std::is_invocable_v<const F&, int64_t, int>>>
    void run(int64_t chunks, const F& f) {
        const Phase phase = make_phase(chunks, f);
        run(&phase, 1);
    }

    // Runs f(thread, threads) once on every thread of the pool. Called from inside a chunk, it runs once for every
    // thread number on the calling thread.
    template <class F>
    void run_on_each(const F& f) {
        Turn turn(*this);
        const int threads = num_threads();
        std::atomic<int> arrived{0};
        const auto body = [&](int64_t chunk, int thread) {
            if (turn.is_serial()) return f(int(chunk), threads);
            // A waiting thread takes no second chunk, so each thread gets one.
            arrived.fetch_add(1);
            while (arrived.load() < threads) std::this_thread::yield();
            f(thread, threads);
        };
        const Phase phase = make_phase(threads, body);
        turn.run(&phase, 1);
    }

    // The chunks [first, end) of a phase that a thread starts with; other threads take the rest from the end.
    static std::pair<int64_t, int64_t> share(int64_t chunks, int thread, int threads) {
        return {chunks * thread / threads, chunks * (thread + 1) / threads};
    }

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

  private:
    ThreadPool();
    ~ThreadPool() = delete;  // lives until the process ends: workers may be asleep in it
    static void before_fork();
    static void after_fork_in_parent();
    static void after_fork_in_child();
    State* state_;
};

// A buffer of at least `bytes`, aligned to 64, that belongs to the calling thread. Its contents are undefined. It is
// valid until the next call on the same thread.
void* thread_scratch(size_t bytes);

}  // namespace pace
