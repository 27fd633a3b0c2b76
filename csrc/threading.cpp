#include "pace/threading.h"

#include <immintrin.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pace/cpu.h"

namespace pace {

namespace {

// How long a thread that finds no chunk spins before it sleeps. Waking a sleeping thread costs 5 to 50 us. The Python
// between two ops of a step takes about 10 us, and the pool should stay awake for that long.
constexpr std::chrono::microseconds kSpinTime{100};

// True on a thread that is inside a chunk: a nested run must not wait for the pool that runs it.
thread_local bool inside_chunk = false;

// Sets denormals and rounding to the C++ standard's defaults, overriding the calling thread's settings. Results must
// not depend on which thread runs a chunk.
class DefaultFloatState {
  public:
    DefaultFloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultFloatState() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
};

// Pins the calling thread to cpus[0], if there is one; then restores its previous affinity.
class Pinned {
  public:
    explicit Pinned(const std::vector<int>& cpus) {
        if (cpus.empty()) return;
        before_ = affinity_cpus();
        set_affinity({cpus[0]});
    }
    ~Pinned() {
        if (before_.empty()) return;
        try {
            set_affinity(before_);
        } catch (const std::exception&) {  // this process may no longer use any of them: the kernel has moved it
        }
    }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

  private:
    std::vector<int> before_;
};

// Spins until `ready()` is true or the time is over; returns ready().
template <class Ready>
bool spin_until(const Ready& ready, bool may_spin) {
    if (!may_spin) return ready();
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            _mm_pause();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return ready();
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void run_serially(const Phase* phases, int count, int64_t* opened) {
    const DefaultFloatState float_state;
    for (int p = 0; p < count; ++p) {
        if (opened) opened[p] = now_ns();
        for (int64_t chunk = 0; chunk < phases[p].chunks; ++chunk) phases[p].body(phases[p].context, chunk, 0);
    }
    if (opened) opened[count] = now_ns();
}

}  // namespace

// How a run works. One phase is open at a time. Each thread has a contiguous range of its chunks and takes them from
// the front. When its range is empty, it takes chunks from the back of the other ranges. So a thread that keeps up
// reads memory in one stream, and gets the same chunks in every run.
//
// A thread that shortens a range by one owns a chunk. While it owns one the phase cannot end, so it may read everything
// about the phase and the run without a lock. The thread whose chunk finishes last opens the next phase, or ends the
// run. A thread that owns nothing reads only the atomics. It may be asleep or far behind without delaying the others:
// at worst it takes, late, a chunk of a later phase.
struct ThreadPool::State {
    // -- one run at a time
    std::mutex run_mutex;

    // -- the run: written by the thread that opens a phase, read by threads that own a chunk
    const Phase* phases = nullptr;
    int num_phases = 0;
    int64_t* opened = nullptr;  // times of openings, or null
    int phase = 0;
    std::exception_ptr error;  // guarded by `failed`, which is set once
    std::atomic<bool> failed{false};
    std::atomic<bool> done{true};

    // Chunks [begin, end) that no thread has begun, with begin in the low half; one range for each thread.
    struct alignas(64) Range {
        std::atomic<uint64_t> bounds{0};
    };
    std::vector<Range> ranges{1};

    alignas(64) std::atomic<int64_t> unfinished{0};
    alignas(64) std::atomic<uint64_t> openings{0};  // counts open_phase(): a thread without work waits for it to change

    // -- sleep
    alignas(64) std::mutex sleep_mutex;
    std::condition_variable work_or_stop;  // for the workers
    std::condition_variable work_or_done;  // for the caller
    std::atomic<int> sleeping_workers{0};
    std::atomic<bool> caller_sleeps{false};
    std::atomic<bool> stop{false};

    // -- workers
    std::atomic<int> num_threads{1};
    std::vector<int> cpus;  // the processor of each thread, the caller first; or empty
    bool may_spin = true;   // no spinning if threads outnumber processors: it would take time from the workers
    std::vector<std::thread> workers;

    // Takes one chunk from the front or the back of a range.
    bool take(Range& range, bool front, int64_t* chunk) {
        uint64_t bounds = range.bounds.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t begin = uint32_t(bounds), end = bounds >> 32;
            if (begin >= end) return false;
            const uint64_t shorter = front ? bounds + 1 : bounds - (uint64_t(1) << 32);
            if (range.bounds.compare_exchange_weak(bounds, shorter, std::memory_order_acquire,
                                                   std::memory_order_relaxed)) {
                *chunk = int64_t(front ? begin : end - 1);
                return true;
            }
        }
    }

    bool claim(int thread, int64_t* chunk) {
        if (take(ranges[thread], true, chunk)) return true;
        const int count = int(ranges.size());
        for (int i = 1; i < count; ++i) {
            if (take(ranges[(thread + i) % count], false, chunk)) return true;
        }
        return false;
    }

    // Distributes the chunks of a phase. A single chunk goes to the thread that opens the phase, which is awake.
    //
    // All ranges are empty here. A range that gets no chunk must not be written. Once the last chunk is in its range,
    // other threads may finish the phase and distribute the next one while this thread is suspended. If it then cleared
    // a range, it would delete chunks of the next phase, and the run would never end.
    void deal(int64_t chunks, int opener) {
        const int count = int(ranges.size());
        for (int t = 0; t < count; ++t) {
            const auto [first, end] =
                chunks == 1 ? std::pair<int64_t, int64_t>(0, t == opener) : share(chunks, t, count);
            if (first < end) ranges[t].bounds.store(uint64_t(first) | uint64_t(end) << 32);
        }
    }

    void stamp(int next) {
        if (opened) opened[next] = now_ns();
    }

    // Opens the first phase with chunks at or after `next`, or ends the run. Call it only while no thread owns a chunk.
    void open_phase(int next, int thread) {
        stamp(next);
        while (next < num_phases && phases[next].chunks <= 0) stamp(++next);
        const bool ended = next == num_phases || failed.load(std::memory_order_relaxed);
        const int64_t chunks = ended ? 0 : phases[next].chunks;
        // Sleepers wait for the stores below, and the loads below check for sleepers. All of them are sequentially
        // consistent, as on the sleeper's side (first "I sleep", then "is there work?"). So one of the two sees the
        // other.
        if (ended) {
            done.store(true);
        } else {
            phase = next;
            unfinished.store(chunks, std::memory_order_relaxed);
            deal(chunks, thread);
        }
        openings.fetch_add(1);
        const bool wake_workers = chunks > 1 && sleeping_workers.load() > 0;
        const bool wake_caller = caller_sleeps.load();
        if (wake_workers || wake_caller) {
            const std::lock_guard<std::mutex> lock(sleep_mutex);
            if (wake_workers) work_or_stop.notify_all();
            if (wake_caller) work_or_done.notify_one();
        }
    }

    // Fetches what a thread reads first after this phase, if its own range is empty. Attention reads little, and the
    // product after it may be next.
    void fetch_next(int thread) const {
        const uint64_t bounds = ranges[thread].bounds.load(std::memory_order_relaxed);
        if (uint32_t(bounds) < bounds >> 32) return;
        for (int next = phase + 1; next < std::min(num_phases, phase + 3); ++next) {
            if (phases[next].fetch) return phases[next].fetch(phases[next].context, thread);
        }
    }

    void run_chunk(int64_t chunk, int thread) {
        if (!failed.load(std::memory_order_relaxed)) {
            inside_chunk = true;
            try {
                fetch_next(thread);
                phases[phase].body(phases[phase].context, chunk, thread);
            } catch (...) {
                if (!failed.exchange(true)) error = std::current_exception();
            }
            inside_chunk = false;
        }
        if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) open_phase(phase + 1, thread);
    }

    void work_until_nothing_is_left(int thread) {
        int64_t chunk;
        while (claim(thread, &chunk)) run_chunk(chunk, thread);
    }

    void worker_main(int thread) {
        const DefaultFloatState float_state;
        uint64_t seen;
        const auto awaited = [&] { return openings.load() != seen || stop.load(); };
        while (!stop.load()) {
            seen = openings.load();
            work_until_nothing_is_left(thread);
            if (spin_until(awaited, may_spin)) continue;
            std::unique_lock<std::mutex> lock(sleep_mutex);
            sleeping_workers.fetch_add(1);
            work_or_stop.wait(lock, awaited);
            sleeping_workers.fetch_sub(1);
        }
    }

    void run(const Phase* new_phases, int count, int64_t* times) {
        phases = new_phases;
        num_phases = count;
        opened = times;
        error = nullptr;
        failed.store(false);
        done.store(false);
        {
            const DefaultFloatState float_state;
            open_phase(0, 0);
            uint64_t seen;
            const auto awaited = [&] { return done.load() || openings.load() != seen; };
            while (!done.load()) {
                seen = openings.load();
                work_until_nothing_is_left(0);
                if (spin_until(awaited, may_spin)) continue;
                std::unique_lock<std::mutex> lock(sleep_mutex);
                caller_sleeps.store(true);
                work_or_done.wait(lock, awaited);
                caller_sleeps.store(false);
            }
        }
        if (error) std::rethrow_exception(std::exchange(error, nullptr));
    }

    void start_workers() {
        const int wanted = num_threads.load() - 1;
        if (int(workers.size()) == wanted) return;
        if (workers.empty()) ranges = std::vector<Range>(wanted + 1);
        may_spin = num_threads.load() <= int(affinity_cpus().size());
        try {
            for (int w = int(workers.size()); w < wanted; ++w) {
                workers.emplace_back([this, w] { worker_main(w + 1); });
                pthread_setname_np(workers[w].native_handle(),
                                   ("pace " + std::to_string(w + 1)).c_str());  // name shown by top -H
                if (!cpus.empty()) set_affinity(workers[w].native_handle(), {cpus[w + 1]});
            }
        } catch (...) {
            stop_workers();
            throw;
        }
    }

    void stop_workers() {
        {
            const std::lock_guard<std::mutex> lock(sleep_mutex);
            stop.store(true);
            work_or_stop.notify_all();
        }
        for (std::thread& worker : workers) worker.join();
        workers.clear();
        ranges = std::vector<Range>(1);
        stop.store(false);
    }
};

ThreadPool::ThreadPool() : state_(new State) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

ThreadPool& ThreadPool::instance() {
    static ThreadPool* const pool = new ThreadPool;
    return *pool;
}

int ThreadPool::num_threads() const { return state_->num_threads.load(); }

std::vector<int> ThreadPool::pinned_cpus() const {
    const std::lock_guard<std::mutex> turn(state_->run_mutex);
    return state_->cpus;
}

void ThreadPool::set_num_threads(int count, bool pinned) {
    if (count < 1 || count > kMaxThreads) {
        throw std::invalid_argument("the number of threads must be between 1 and " + std::to_string(kMaxThreads) +
                                    ", got " + std::to_string(count));
    }
    if (inside_chunk) throw std::logic_error("set_num_threads was called from inside a parallel run");
    const std::vector<int> cpus = pinned ? cpus_to_pin("", affinity_cpus(), count) : std::vector<int>();
    const std::lock_guard<std::mutex> turn(state_->run_mutex);
    if (count == num_threads() && cpus == state_->cpus) return;
    state_->stop_workers();
    state_->num_threads.store(count);
    state_->cpus = cpus;
}

ThreadPool::Turn::Turn(ThreadPool& pool) : state_(inside_chunk ? nullptr : pool.state_) {
    if (state_) state_->run_mutex.lock();
}

ThreadPool::Turn::~Turn() {
    if (state_) state_->run_mutex.unlock();
}

void ThreadPool::Turn::run(const Phase* phases, int count, int64_t* opened) {
    if (!state_) return run_serially(phases, count, opened);
    state_->start_workers();
    const Pinned caller(state_->cpus);
    state_->run(phases, count, opened);
}

void ThreadPool::run(const Phase* phases, int count, int64_t* opened) { Turn(*this).run(phases, count, opened); }

// fork() copies only the calling thread. The parent's handlers make it wait for runs in flight. The child drops the
// copied state, whose workers do not exist there, and starts anew. It leaks that state on purpose: destroying a
// std::thread that was never joined ends the process.
void ThreadPool::before_fork() { instance().state_->run_mutex.lock(); }

void ThreadPool::after_fork_in_parent() { instance().state_->run_mutex.unlock(); }

void ThreadPool::after_fork_in_child() {
    const State& parents = *instance().state_;
    State* const state = new State;
    state->num_threads.store(parents.num_threads.load());
    state->cpus = parents.cpus;
    instance().state_ = state;
}

void* thread_scratch(size_t bytes) {
    struct Buffer {
        void* data = nullptr;
        size_t capacity = 0;
        ~Buffer() { std::free(data); }
    };
    thread_local Buffer buffer;
    if (bytes > buffer.capacity) {
        const size_t rounded = (bytes + 4095) / 4096 * 4096;
        void* const data = std::aligned_alloc(64, rounded);
        if (data == nullptr) throw std::bad_alloc();
        std::free(buffer.data);
        buffer.data = data;
        buffer.capacity = rounded;
    }
    return buffer.data;
}

}  // namespace pace
