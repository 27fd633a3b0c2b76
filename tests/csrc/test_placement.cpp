// Weights lie next to the threads that read them. Tests which thread reads which panels, and which thread writes them
// first. The machine may have only one node, so the system's page placement itself is not tested.
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstring>

#include "check.h"
#include "pace/ops.h"

namespace {

using namespace pace;

// A weight of zeros on its own small pages; only its header has been written.
class Pages {
  public:
    Pages(int64_t n, int64_t k, bool glu) : bytes_(size_t(packed_bytes(n, k, {.dtype = DType::F32}, glu))) {
        data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(data_, bytes_, MADV_NOHUGEPAGE);
        init_packed(data_, n, k, {.dtype = DType::F32}, glu);
    }
    ~Pages() { munmap(data_, bytes_); }
    void* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_;
    void* data_;
};

// Number of pages that each thread of the pool has made resident so far.
std::vector<int64_t> page_faults() {
    std::vector<int64_t> faults(size_t(ThreadPool::instance().num_threads()));
    ThreadPool::instance().run_on_each([&](int thread, int) {
        rusage usage = {};
        getrusage(RUSAGE_THREAD, &usage);
        faults[size_t(thread)] = usage.ru_minflt;
    });
    return faults;
}

}  // namespace

TEST(a_thread_begins_with_the_panels_that_are_its_own) {
    for (const bool glu : {false, true}) {
        for (const int64_t n : {16, 112, 144, 1600, 6432}) {
            const Pages weight(n, 8, glu);
            for (const int threads : {1, 2, 3, 7}) {
                for (const int64_t rows : {1, 5, 16}) {
                    const int64_t n_out = glu ? n / 2 : n;
                    const std::vector<float> x(size_t(rows) * 8, 1.0f);
                    LinearOp op = {};
                    op.x = x.data();
                    op.x_stride = 8;
                    op.rows = rows;
                    op.weight = weight.data();
                    std::vector<float> out(size_t(rows * n_out));
                    op.out = out.data();
                    op.prepare(threads);
                    for (int t = 0; t < threads; ++t) {
                        out.assign(out.size(), check::kPoison);
                        const auto [begin, stop] = ThreadPool::share(op.chunks(1), t, threads);
                        for (int64_t chunk = begin; chunk < stop; ++chunk) op.run(1, chunk, t);
                        const auto [first, end] = panels_of_thread(packed_header(weight.data()).panels, t, threads);
                        const int64_t columns_per_panel = glu ? kPanelRows / 2 : kPanelRows;
                        for (int64_t column = 0; column < n_out; ++column) {
                            const bool written = out[size_t(column)] == 0.0f;
                            const bool own = first * columns_per_panel <= column && column < end * columns_per_panel;
                            CHECK(written == own);
                        }
                    }
                }
            }
        }
    }
}

TEST(pages_are_written_first_by_the_thread_that_reads_them) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    constexpr int64_t kMost = 4;  // a sanitizer also writes to shadow pages
#else
    constexpr int64_t kMost = 1;
#endif
    constexpr int64_t kFew = 32;  // pages of stacks and the like
    constexpr int64_t kPanelPages = 128;
    for (const int threads : {1, 2, 4}) {
        ThreadPool::instance().set_num_threads(threads);
        for (int repeat = 0; repeat < 5; ++repeat) {
            const Pages weight(9 * kPanelRows, kPanelPages * 4096 / sizeof(float) / kPanelRows,
                               false);  // shares differ
            const std::vector<int64_t> before = page_faults();
            place_packed(weight.data());
            const std::vector<int64_t> after = page_faults();
            for (int t = 0; t < threads; ++t) {
                const auto [first, end] = panels_of_thread(9, t, threads);
                const int64_t pages = (end - first) * kPanelPages, faults = after[size_t(t)] - before[size_t(t)];
                CHECK(faults >= pages - 1 && faults <= kMost * pages + kFew);
            }
            std::vector<unsigned char> resident((weight.bytes() + 4095) / 4096);
            CHECK(mincore(weight.data(), weight.bytes(), resident.data()) == 0);
            for (const unsigned char page : resident) CHECK(page & 1);
        }
    }
}

TEST(placing_a_weight_leaves_it_zero) {
    ThreadPool::instance().set_num_threads(3);
    const Pages weight(1000, 300, false);
    const PackedHeader before = packed_header(weight.data());
    place_packed(weight.data());
    CHECK(std::memcmp(&packed_header(weight.data()), &before, sizeof before) == 0);
    const std::vector<char> zeros(weight.bytes() - sizeof before);
    CHECK(std::memcmp(static_cast<const char*>(weight.data()) + sizeof before, zeros.data(), zeros.size()) == 0);
}
