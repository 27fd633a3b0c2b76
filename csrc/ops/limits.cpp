#include "pace/limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "pace/kernels.h"
#include "pace/threading.h"

namespace pace {

namespace {

double now() {
    using Clock = std::chrono::steady_clock;
    return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// The shortest time of at least three runs of `body`, repeated for about `seconds`.
template <class Body>
double shortest(double seconds, const Body& body) {
    double best = 1e30;
    const double end = now() + seconds;
    for (int i = 0; i < 3 || now() < end; ++i) {
        const double begin = now();
        body();
        best = std::min(best, now() - begin);
    }
    return best;
}

}  // namespace

double read_bandwidth(size_t buffer_bytes, double seconds) {
    constexpr size_t kChunk = 512 * 1024;
    const size_t chunks = std::max<size_t>(1, buffer_bytes / kChunk), bytes = chunks * kChunk;
    void* buffer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) throw std::bad_alloc();
    madvise(buffer, bytes, MADV_HUGEPAGE);
    float* const data = static_cast<float*>(buffer);
    ThreadPool& pool = ThreadPool::instance();
    constexpr size_t kFloats = kChunk / sizeof(float);
    pool.run(int64_t(chunks), [&](int64_t c, int) { std::fill_n(data + c * kFloats, kFloats, 1.0f); });
    const double best = shortest(seconds, [&] {
        pool.run(int64_t(chunks), [&](int64_t c, int) { kernels().read_floats(data + c * kFloats, kFloats); });
    });
    munmap(buffer, bytes);
    return double(bytes) / best;
}

double fma_peak(double seconds) {
    constexpr int64_t kSteps = 200 * 1000;
    ThreadPool& pool = ThreadPool::instance();
    const int threads = pool.num_threads();
    const double flops_per_chunk = kernels().spin_fma(1) * double(kSteps);
    // Several chunks for each thread, so that a slow core takes fewer of them.
    const int64_t chunks = threads * 8;
    const double best = shortest(seconds, [&] { pool.run(chunks, [&](int64_t, int) { kernels().spin_fma(kSteps); }); });
    return flops_per_chunk * double(chunks) / best;
}

}  // namespace pace
