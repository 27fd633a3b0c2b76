// Cuts norms into whole rows. A chunk has enough of them that the cost of claiming it is negligible.
#include <algorithm>
#include <cstring>

#include "pace/row_ops.h"
#include "pace/state_ops.h"

namespace pace {

namespace {
constexpr int64_t kChunkElements = 8 * 1024;  // about 2 us of work

auto kernel_of(const Norm& norm) { return norm.kind == Norm::Kind::Layer ? kernels().layer_norm : kernels().rms_norm; }
}  // namespace

void norm_head(const Norm& norm, int64_t head, float* x, int64_t k) {
    kernel_of(norm)({x, norm.weight + head * norm.head_stride, norm.bias, x}, k, norm.eps);
}

void NormOp::prepare(int) {
    rows_per_chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, k));
    chunk_count = (rows + rows_per_chunk - 1) / rows_per_chunk;
}

void NormOp::run(int, int64_t chunk, int) const {
    const auto normalise = kernel_of(norm);
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        float* const row = y + r * k;
        normalise({x + r * x_stride, norm.weight, norm.bias, row}, k, norm.eps);
        if (!residual) continue;
        const float* const from = residual + r * residual_stride;
        for (int64_t i = 0; i < k; ++i) row[i] = (from[i] + row[i]) * factor;
    }
}

void HeadNormOp::prepare(int) {
    tokens_per_chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, heads * head_dim));
    chunk_count = (tokens + tokens_per_chunk - 1) / tokens_per_chunk;
}

void HeadNormOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(tokens, (chunk + 1) * tokens_per_chunk);
    for (int64_t t = chunk * tokens_per_chunk; t < end; ++t) {
        for (int64_t h = 0; h < heads; ++h) norm_head(norm, h, x.at(t, h), head_dim);
    }
}

void GatedNormOp::prepare(int) {
    rows_per_chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, k));
    chunk_count = (rows + rows_per_chunk - 1) / rows_per_chunk;
}

void GatedNormOp::run(int, int64_t chunk, int) const {
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk), width = k / norm.groups;
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        const float *const gates = gate + r * gate_stride, *from = x + r * x_stride;
        float* const to = y + r * k;
        if (!norm.norm_first) {
            std::memcpy(to, from, size_t(k) * sizeof(float));
            kernels().gate(norm.kind, gates, to, k, 1);
            from = to;
        }
        for (int64_t g = 0; g < norm.groups; ++g) {
            const NormRow part = {from + g * width, norm.weight + g * norm.weight_stride, nullptr, to + g * width};
            kernels().rms_norm(part, width, norm.eps);
        }
        if (norm.norm_first) kernels().gate(norm.kind, gates, to, k, 1);
    }
}

}  // namespace pace
