// Elementwise ops: enough elements a chunk that claiming it costs nothing beside it.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/ops.h"

namespace pace {

namespace {
constexpr int64_t kChunkElements = 16 * 1024;
}  // namespace

void ActivationOp::prepare(int) {
    elements_per_chunk = kChunkElements;
    chunk_count = divide_up(count, elements_per_chunk);
}

void ActivationOp::run(int, int64_t chunk, int) const {
    const int64_t begin = chunk * elements_per_chunk;
    kernels().activation(activation, x + begin, y + begin, std::min(elements_per_chunk, count - begin));
}

void AddOp::prepare(int) { chunk_count = divide_up(count, kChunkElements); }

void AddOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(count, (chunk + 1) * kChunkElements);
    for (int64_t i = chunk * kChunkElements; i < end; ++i) y[i] = a[i] + b[i];
}

void GatherRowsOp::prepare(int) {
    for (int64_t r = 0; r < count; ++r) {
        if (indices[r] < 0 || indices[r] >= x_rows) {
            throw std::invalid_argument("row " + std::to_string(indices[r]) + " is wanted of " +
                                        std::to_string(x_rows));
        }
    }
    rows_per_chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, k));
    chunk_count = divide_up(count, rows_per_chunk);
}

void GatherRowsOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(count, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r)
        std::memcpy(y + r * k, x + indices[r] * k, size_t(k) * sizeof(float));
}

}  // namespace pace
