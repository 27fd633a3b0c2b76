// Packed weights in tests: their memory, their pieces, products with them, and their rows as they come back.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "check.h"
#include "pace/convert.h"
#include "pace/ops.h"

namespace check {

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;

// Aligned memory, filled with zeros.
inline Memory zeros(int64_t bytes) {
    void* const p = std::aligned_alloc(64, size_t(pace::round_up(bytes, 64)));
    return Memory(std::memset(p, 0, size_t(bytes)));
}

inline Memory empty_weight(int64_t n, int64_t k, const pace::PackedFormat& format, bool glu = false) {
    Memory weight = zeros(pace::packed_bytes(n, k, format, glu));
    pace::init_packed(weight.get(), n, k, format, glu);
    return weight;
}

// Calls `pack(first, rows)` for three pieces of n rows that cut panels, the last first.
template <class Pack>
void pack_in_pieces(int64_t n, Pack&& pack) {
    const int64_t cuts[] = {0, n / 3, n - n / 4, n};
    for (int piece = 2; piece >= 0; --piece) pack(cuts[piece], cuts[piece + 1] - cuts[piece]);
}

// A value as a weight of floats stores it.
inline float rounded(float value, pace::DType dtype) {
    pace::BF16 bf16;
    pace::F16 f16;
    pace::from_float(value, bf16);
    pace::from_float(value, f16);
    return dtype == pace::DType::F32 ? value : dtype == pace::DType::BF16 ? pace::to_float(bf16) : pace::to_float(f16);
}

// Products [rows][n] of all rows.
inline std::vector<float> multiply(Inputs& x, const void* weight, int64_t n, const float* bias = nullptr,
                                   const int32_t* order = nullptr) {
    std::vector<float> out(size_t(x.rows * n), kPoison);
    pace::LinearOp op = {};
    op.x = x.row(0);
    op.x_stride = x.stride;
    op.rows = x.rows;
    op.weight = weight;
    op.order = order;
    op.bias = bias;
    op.out = out.data();
    pace::execute(op);
    return out;
}

// An order of k columns, which share no factor with 37.
inline std::vector<int32_t> some_order(int64_t k) {
    std::vector<int32_t> order(size_t(k), 0);
    for (int64_t j = 0; j < k; ++j) order[size_t(j)] = int32_t((j * 37 + 11) % k);
    return order;
}

// True if the rows of a weight come back as `value(row, column)`, with columns in `some_order`.
template <class Value>
bool rows_come_back(const void* weight, int64_t n, int64_t k, Value&& value) {
    const std::vector<int32_t> order = some_order(k);
    std::vector<float> rows(size_t(n * k), kPoison);
    pace::GatherOp gather = {weight, nullptr, n, rows.data(), true, 0, order.data(), 0, 0};
    pace::execute(gather);
    for (int64_t r = 0; r < n; ++r)
        for (int64_t j = 0; j < k; ++j)
            if (rows[size_t(r * k + order[size_t(j)])] != value(r, j)) return false;
    return true;
}

}  // namespace check
