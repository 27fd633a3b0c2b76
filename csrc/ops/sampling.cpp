// Argmax, softmax, masks and top-k / top-p for rows of logits. A chunk is a row, or with masks a piece of one.
#include <algorithm>
#include <cmath>
#include <limits>

#include "candidates.h"
#include "pace/row_ops.h"
#include "row_weights.h"

namespace pace {

void ArgmaxOp::run(int, int64_t row, int) const {
    const float* const x = logits + row * row_stride;
    const int64_t index = kernels().argmax(x, n);
    indices[row] = index >= 0 && std::isinf(x[index]) ? -1 : index;
}

void SoftmaxOp::run(int, int64_t row, int) const {
    const KernelTable& table = kernels();
    const float* const x = logits + row * row_stride;
    const Survey given = survey(x, n, weight_scale(1.0f));  // as in SampleOp, so that both give the same bits
    const ExpSum total = {given.max, given.total};
    if (log) {
        table.log_softmax(x, n, total.max, float(std::log(total.sum)), y + row * n);
    } else {
        table.softmax(x, n, total, y + row * n);
    }
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

void TopKTopPOp::run(int, int64_t row, int) const {
    float* const x = logits + row * row_stride;
    const bool limit_k = top_k[row] > 0 && top_k[row] < n;
    const bool limit_p = top_p[row] < 1.0f;
    if (!limit_k && !limit_p) return;
    const ExpSum all = limit_p && !limit_k ? kernels().exp_sum(x, n) : ExpSum{};

    Candidates candidates;
    float max = all.max;
    double total = all.sum;
    if (limit_k) {
        if (kernels().argmax(x, n) < 0) return;  // NaN has no order
        candidates = TopK(x, n, top_k[row], kMinusInfinity, 1.0f).find();
        max = std::max_element(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
                  return a.value < b.value;
              })->value;
        for (Candidate& c : candidates) total += c.weight = weight_of(c.value, max);
    }
    if (limit_p && std::isfinite(total)) {
        const double mass = double(top_p[row]) * total;
        if (!limit_k) candidates = find_top_mass(x, n, max, mass);
        cut_to_nucleus(candidates, mass);
    } else if (!limit_k) {
        return;
    }
    std::fill(x, x + n, kMinusInfinity);
    for (const Candidate& c : candidates) x[c.index] = c.value;
}

}  // namespace pace
