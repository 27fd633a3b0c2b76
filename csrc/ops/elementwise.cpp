// Elementwise ops. A chunk has enough elements that the cost of claiming it is negligible.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/ops.h"
#include "pace/row_ops.h"
#include "pace/state_ops.h"

namespace pace {

namespace {

constexpr int64_t kChunkElements = 16 * 1024;

int64_t rows_of_chunk(int64_t k) { return std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, k)); }

struct Piece {
    int64_t row, begin, end;
};

// The piece of chunk number `chunk`, in rows of k elements.
Piece piece_of_row(int64_t k, int64_t chunk) {
    const int64_t per_row = divide_up(k, kChunkElements), begin = chunk % per_row * kChunkElements;
    return {chunk / per_row, begin, std::min(k, begin + kChunkElements)};
}

}  // namespace

void ActivationOp::prepare(int) {
    rows_per_chunk = rows_of_chunk(k);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void ActivationOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r)
        kernels().activation(activation, x + r * x_stride, y + r * k, k);
}

void GluOp::prepare(int) {
    rows_per_chunk = rows_of_chunk(k);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void GluOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        const float *const gate = x + r * x_stride, *const up = gate + k;
        float* const row = y + r * k;
        kernels().activation(activation, gate, row, k);
        for (int64_t i = 0; i < k; ++i) row[i] *= up[i];
    }
}

void AddOp::prepare(int) {
    rows_per_chunk = rows_of_chunk(k);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void AddOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        const float *const left = a + r * a_stride, *const right = b + r * b_stride;
        float* const sum = y + r * k;
        for (int64_t i = 0; i < k; ++i) sum[i] = left[i] + right[i];
    }
}

void GateOp::prepare(int) {
    rows_per_chunk = rows_of_chunk(k);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void GateOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        kernels().gate(kind, gate + r * gate_stride, x + r * x_stride, groups, k / groups);
    }
}

int64_t ScaleOp::chunks(int) const { return rows * divide_up(k, kChunkElements); }

void ScaleOp::run(int, int64_t chunk, int) const {
    const auto [row, begin, end] = piece_of_row(k, chunk);
    float* const elements = x + row * x_stride;
    if (factors) {
        for (int64_t i = begin; i < end; ++i) elements[i] *= factors[i];
    } else {
        for (int64_t i = begin; i < end; ++i) elements[i] *= factor;
    }
}

int64_t SoftcapOp::chunks(int) const { return rows * divide_up(k, kChunkElements); }

void SoftcapOp::run(int, int64_t chunk, int) const {
    const auto [row, begin, end] = piece_of_row(k, chunk);
    kernels().softcap(x + row * x_stride + begin, end - begin, cap);
}

void PlaceRowsOp::prepare(int) {
    for (int64_t r = 0; indices && r < count; ++r) {
        if (indices[r] < 0 || indices[r] >= x_rows) {
            throw std::invalid_argument("a row is given for row " + std::to_string(indices[r]) + " of " +
                                        std::to_string(x_rows));
        }
        if (r > 0 && indices[r] <= indices[r - 1]) {
            throw std::invalid_argument("the places of given rows must ascend; got " + std::to_string(indices[r - 1]) +
                                        " before " + std::to_string(indices[r]));
        }
    }
    rows_per_chunk = rows_of_chunk(k);
    chunk_count = divide_up(count, rows_per_chunk);
}

void PlaceRowsOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(count, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        float* const to = x + (indices ? indices[r] : r) * x_stride;
        const float* const from = rows + r * rows_stride;
        if (add) {
            for (int64_t i = 0; i < k; ++i) to[i] += from[i];
        } else {
            std::memcpy(to, from, size_t(k) * sizeof(float));
        }
    }
}

void GatherRowsOp::prepare(int) {
    for (int64_t r = 0; r < count; ++r) {
        if (indices[r] < 0 || indices[r] >= x_rows) {
            throw std::invalid_argument("row " + std::to_string(indices[r]) + " is wanted of " +
                                        std::to_string(x_rows));
        }
    }
    rows_per_chunk = rows_of_chunk(k);
    chunk_count = divide_up(count, rows_per_chunk);
}

void GatherRowsOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(count, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r)
        std::memcpy(y + r * k, x + indices[r] * x_stride, size_t(k) * sizeof(float));
}

}  // namespace pace
