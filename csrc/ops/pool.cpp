// Pools the rows of texts. A chunk is a band of columns of one text.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/ops.h"
#include "pace/row_ops.h"

namespace pace {

namespace {

constexpr int64_t kBand = 128;  // columns of a chunk: 8 cache lines of each row

// y [k] = (sum over rows r of weight(r) * x[r]) / divisor.
template <class Weight>
void sum_rows(const float* x, int64_t x_stride, int64_t rows, int64_t k, float* y, float divisor,
              const Weight& weight) {
    float totals[kBand] = {};
    for (int64_t r = 0; r < rows; ++r, x += x_stride) {
        const float factor = weight(r);
        for (int64_t i = 0; i < k; ++i) totals[i] += factor * x[i];
    }
    for (int64_t i = 0; i < k; ++i) y[i] = totals[i] / divisor;
}

void largest(const float* x, int64_t x_stride, int64_t rows, int64_t k, float* y) {
    std::memcpy(y, x, size_t(k) * sizeof(float));
    for (int64_t r = 1; r < rows; ++r) {
        x += x_stride;
        for (int64_t i = 0; i < k; ++i) y[i] = x[i] > y[i] || x[i] != x[i] ? x[i] : y[i];
    }
}

}  // namespace

void PoolOp::prepare(int) {
    for (int64_t s = 0; s < count; ++s) {
        if (starts[s] >= starts[s + 1]) throw std::invalid_argument("text " + std::to_string(s) + " has no rows");
    }
    if (count == 0 ? rows != 0 : starts[0] != 0 || starts[count] != rows) {
        throw std::invalid_argument("texts have rows " + std::to_string(count ? starts[0] : 0) + " to " +
                                    std::to_string(count ? starts[count] : 0) + " of x, which has " +
                                    std::to_string(rows));
    }
}

int64_t PoolOp::chunks(int) const { return count * divide_up(k, kBand); }

void PoolOp::run(int, int64_t chunk, int) const {
    const int64_t bands = divide_up(k, kBand), s = chunk / bands, column = chunk % bands * kBand;
    const int64_t width = std::min(kBand, k - column), n = starts[s + 1] - starts[s];
    const float* const from = x + starts[s] * x_stride + column;
    float* const to = y + s * k + column;
    const auto sum = [&](double divisor, const auto& weight) {
        sum_rows(from, x_stride, n, width, to, float(divisor), weight);
    };
    switch (pooling) {
        case Pooling::First:
            std::memcpy(to, from, size_t(width) * sizeof(float));
            break;
        case Pooling::Last:
            std::memcpy(to, from + (n - 1) * x_stride, size_t(width) * sizeof(float));
            break;
        case Pooling::Max:
            largest(from, x_stride, n, width, to);
            break;
        case Pooling::Mean:
            sum(double(n), [](int64_t) { return 1.0f; });
            break;
        case Pooling::SqrtMean:
            sum(std::sqrt(double(n)), [](int64_t) { return 1.0f; });
            break;
        case Pooling::WeightedMean:
            sum(0.5 * double(n) * double(n + 1), [](int64_t r) { return float(r + 1); });
            break;
    }
}

}  // namespace pace
