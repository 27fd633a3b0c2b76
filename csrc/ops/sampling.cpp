// Argmax and masks for rows of logits. A chunk is a row, or with masks a piece of one.
#include <algorithm>
#include <cmath>

#include "pace/row_ops.h"

namespace pace {

void ArgmaxOp::run(int, int64_t row, int) const {
    const float* const x = logits + row * row_stride;
    const int64_t index = kernels().argmax(x, n);
    indices[row] = index >= 0 && std::isinf(x[index]) ? -1 : index;
}

namespace {

// Tokens in a piece: 128 KiB of logits, so that threads share one row of a large vocabulary.
constexpr int64_t kMaskedAtOnce = 32768;

}  // namespace

int64_t MaskOp::pieces() const { return (n + kMaskedAtOnce - 1) / kMaskedAtOnce; }

void MaskOp::run(int, int64_t chunk, int) const {
    const int64_t mask = chunk / pieces(), begin = chunk % pieces() * kMaskedAtOnce;
    const int64_t row = rows ? rows[mask] : mask;
    float* const x = logits + row * row_stride + begin;
    kernels().apply_mask(x, bits + mask * bits_stride + begin / 32, std::min(kMaskedAtOnce, n - begin), x);
}

}  // namespace pace
