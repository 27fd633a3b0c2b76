// Adapters: every table and dtype against float64. Rows are misaligned, with NaN around them; other rows and columns
// keep their bits.
#include <cstring>
#include <memory>

#include "pace/adapter_ops.h"
#include "weights.h"

namespace {

using namespace pace;

constexpr int64_t kStarts[] = {0, 21, 30, 62}, kParts = 3, kSlots = 3, kMaxRank = 20;
constexpr int64_t kRanks[kSlots][kParts] = {{4, 20, 1}, {0, 0, 0}, {0, 17, 16}};  // 0: no matrices

struct Matrix {
    int64_t n, k;
    std::vector<float> values;
    check::Memory memory;

    Matrix(int64_t n, int64_t k, DType dtype, uint32_t seed)
        : n(n), k(k), values(check::heavy_tailed(size_t(n * k), seed)) {
        for (float& value : values) value = check::rounded(value, dtype);
        memory = check::empty_weight(n, k, {.dtype = dtype});
        PackOp op = {memory.get(), 0, n, values.data(), DType::F32, k, 0, 0};
        execute(op);
    }
};

// An adapter for each slot with ranks, of a product [rows][62] of inputs of k elements.
struct Adapters {
    int64_t k;
    DType dtype;
    std::vector<std::unique_ptr<Matrix>> a, b;  // by slot; by slot and part
    std::vector<float> bias = check::heavy_tailed(9, 5), scales = std::vector<float>(kSlots * kParts);
    std::vector<int64_t> addresses = std::vector<int64_t>(kSlots * (1 + 2 * kParts));

    Adapters(int64_t k, DType dtype) : k(k), dtype(dtype), a(kSlots), b(kSlots * kParts) {
        for (int64_t slot = 0; slot < kSlots; ++slot) {
            int64_t ranks = 0;
            int64_t* const own = &addresses[size_t(slot * (1 + 2 * kParts))];
            for (int64_t part = 0; part < kParts; ++part) {
                const int64_t rank = kRanks[slot][part], index = slot * kParts + part;
                ranks += rank;
                scales[size_t(index)] = 0.5f + float(index);
                if (rank == 0) continue;
                b[size_t(index)] =
                    std::make_unique<Matrix>(kStarts[part + 1] - kStarts[part], rank, dtype, uint32_t(index));
                own[1 + 2 * part] = int64_t(b[size_t(index)]->memory.get());
                if (part == 1) own[2 + 2 * part] = int64_t(bias.data());
            }
            if (ranks == 0) continue;
            a[size_t(slot)] = std::make_unique<Matrix>(ranks, k, dtype, uint32_t(100 + slot));
            own[0] = int64_t(a[size_t(slot)]->memory.get());
        }
    }
    AdapterTable table() const {
        return {addresses.data(), scales.data(), kStarts, kSlots, kParts, k, kMaxRank, dtype};
    }

    // Adds one adapter to a row in float64, and its error to `bound`: chains of k and of kMaxRank products. With
    // `rounds`, two inputs are rounded to bf16. The factor 2 is for generic (test_linear.cpp).
    void add(const float* x, int64_t slot, double weight, bool rounds, double* y, double* bound) const {
        if (!a[size_t(slot)]) return;
        int64_t first = 0;
        const double unit = 2.0 * double(k + kMaxRank + 6) * 0x1p-24 + (rounds ? 2.02 * 0x1p-8 : 0.0);
        for (int64_t part = 0; part < kParts; ++part) {
            const int64_t rank = kRanks[slot][part], index = slot * kParts + part;
            for (int64_t n = 0; rank > 0 && n < kStarts[part + 1] - kStarts[part]; ++n) {
                double sum = part == 1 ? double(bias[size_t(n)]) : 0.0, size = std::fabs(sum);
                for (int64_t r = 0; r < rank; ++r) {
                    double t = 0, magnitude = 0;
                    for (int64_t i = 0; i < k; ++i) {
                        const double product =
                            double(x[i]) * double(a[size_t(slot)]->values[size_t((first + r) * k + i)]);
                        t += product;
                        magnitude += std::fabs(product);
                    }
                    const double factor = double(b[size_t(index)]->values[size_t(n * rank + r)]);
                    sum += factor * t;
                    size += std::fabs(factor) * magnitude;
                }
                const double strength = weight * double(scales[size_t(index)]);
                y[kStarts[part] + n] += strength * sum;
                bound[kStarts[part] + n] +=
                    unit * (std::fabs(strength) * size + std::fabs(y[kStarts[part] + n])) + 1e-30;
            }
            first += rank;
        }
    }
};

// Routing of rows: none, one adapter or two, and a slot that is empty.
std::vector<float> routing_of(int64_t rows) {
    static const float kKinds[][4] = {{0, -1, 1, 0}, {-1, -1, 0, 0}, {2, 0, 0.5f, -2}, {1, -1, 3, 0}, {2, -1, 1, 0}};
    std::vector<float> routing;
    for (int64_t r = 0; r < rows; ++r) routing.insert(routing.end(), kKinds[r % 5], kKinds[r % 5] + 4);
    return routing;
}

void run(check::Inputs& x, check::Inputs& y, const Adapters& adapters, const std::vector<float>& routing) {
    AddAdaptersOp op = {};
    op.adapters = adapters.table();
    op.x = x.row(0);
    op.x_stride = x.stride;
    op.rows = x.rows;
    op.routing = routing.data();
    op.per_row = 2;
    op.y = y.row(0);
    op.y_stride = y.stride;
    execute(op);
}

}  // namespace

TEST_TABLES(adapters_are_those_of_float64) {
    for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
        for (const int64_t k : {1, 70}) {
            const Adapters adapters(k, dtype);
            for (const int64_t rows : {1, 3, 70}) {
                check::Inputs x(rows, k, false, 1), y(rows, kStarts[kParts], false, 2), before = y;
                const std::vector<float> routing = routing_of(rows);
                run(x, y, adapters, routing);
                const bool rounds = table.rounds_inputs && dtype == DType::BF16;
                for (int64_t r = 0; r < rows; ++r) {
                    std::vector<double> expected(before.row(r), before.row(r) + kStarts[kParts]),
                        bound(expected.size(), 0.0);
                    for (int place = 0; place < 2; ++place) {
                        const float slot = routing[size_t(4 * r + place)];
                        if (slot >= 0)
                            adapters.add(x.row(r), int64_t(slot), double(routing[size_t(4 * r + 2 + place)]), rounds,
                                         expected.data(), bound.data());
                    }
                    CHECK_CLOSE(y.row(r), expected.data(), bound.data(), expected.size(), "a row with adapters");
                }
                for (size_t i = 0; i < y.memory.size(); ++i)
                    CHECK(std::isnan(y.memory[i]) == std::isnan(before.memory[i]));
            }
        }
    }
}

TEST(a_row_of_adapters_has_the_same_bits_alone_and_with_any_threads) {
    ThreadPool& pool = ThreadPool::instance();
    const int threads_before = pool.num_threads();
    const Adapters adapters(70, DType::BF16);
    check::Inputs all(150, 70, false, 1), together(150, kStarts[kParts], false, 2), y = together;
    run(all, together, adapters, routing_of(150));
    for (int threads = 1; threads <= 5; ++threads) {
        pool.set_num_threads(threads);
        check::Inputs again = y;
        run(all, again, adapters, routing_of(150));
        CHECK(std::memcmp(again.memory.data(), together.memory.data(), again.memory.size() * sizeof(float)) == 0);
        for (int64_t r = 0; r < 5; ++r) {
            check::Inputs one(1, 70, false, 1), row(1, kStarts[kParts], false, 2);
            std::memcpy(one.row(0), all.row(r), 70 * sizeof(float));
            std::memcpy(row.row(0), y.row(r), size_t(kStarts[kParts]) * sizeof(float));
            const std::vector<float> routing = routing_of(5);
            run(one, row, adapters, {routing.begin() + 4 * r, routing.begin() + 4 * r + 4});
            CHECK(std::memcmp(row.row(0), together.row(r), size_t(kStarts[kParts]) * sizeof(float)) == 0);
        }
    }
    pool.set_num_threads(threads_before);
}
