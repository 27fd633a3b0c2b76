// Argmax, softmax, masks and top-k / top-p of rows of logits; a row is a chunk, or with masks a piece of one.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "pace/row_ops.h"

namespace pace {

void ArgmaxOp::run(int, int64_t row, int) const {
    const float* const x = logits + row * row_stride;
    const int64_t index = kernels().argmax(x, n);
    indices[row] = index >= 0 && x[index] == std::numeric_limits<float>::infinity() ? -1 : index;
}

void SoftmaxOp::run(int, int64_t row, int) const {
    const KernelTable& table = kernels();
    const float* const x = logits + row * row_stride;
    const ExpSum total = table.exp_sum(x, n);
    if (log) {
        table.log_softmax(x, n, total.max, float(std::log(total.sum)), y + row * n);
    } else {
        table.softmax(x, n, total, y + row * n);
    }
}

namespace {

// Tokens of a piece: 128 KiB of logits, so that one row of a large vocabulary is shared among threads.
constexpr int64_t kMaskedAtOnce = 32768;

}  // namespace

int64_t MaskOp::pieces() const { return (n + kMaskedAtOnce - 1) / kMaskedAtOnce; }

void MaskOp::run(int, int64_t chunk, int) const {
    const int64_t mask = chunk / pieces(), begin = chunk % pieces() * kMaskedAtOnce;
    const int64_t row = rows ? rows[mask] : mask;
    kernels().apply_mask(logits + row * row_stride + begin, bits + mask * bits_stride + begin / 32,
                         std::min(kMaskedAtOnce, n - begin));
}

namespace {

struct Candidate {
    float value;
    int32_t index;
    double
        weight;  // exp(value - max of the row), where a nucleus is wanted; the probability is weight / sum of weights
};

// The order in which words are kept: larger values first, lower indices first among equals.
bool goes_before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}

using Candidates = std::vector<Candidate>;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// All elements of x that are at least the k-th largest of them (1 <= k), in no order.
//
// One pass with a rising threshold, the k-th largest seen so far: in a row in random order only about k ln(n / k)
// elements get past it. The candidates are thinned out each time they have doubled, so that even a rising row costs a
// few steps per element.
Candidates find_top_k(const float* x, int64_t n, int64_t k) {
    constexpr int kFoundAtOnce = 1024;
    int32_t found[kFoundAtOnce];
    Candidates candidates;
    float threshold = kMinusInfinity;
    const auto thin_out = [&] {
        if (int64_t(candidates.size()) <= k) return;
        std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), goes_before);
        threshold = candidates[k - 1].value;
        const auto below = [&](const Candidate& c) { return c.value < threshold; };
        candidates.erase(std::remove_if(candidates.begin(), candidates.end(), below), candidates.end());
    };
    size_t limit = size_t(std::max<int64_t>(2 * k, kFoundAtOnce));
    for (int64_t position = 0; position < n;) {
        const int count = kernels().find_at_least(x, n, threshold, &position, found, kFoundAtOnce);
        for (int i = 0; i < count; ++i) candidates.push_back({x[found[i]], found[i], 0.0});
        if (candidates.size() >= limit) {
            thin_out();
            limit = std::max(limit, 2 * candidates.size());
        }
    }
    thin_out();
    return candidates;
}

double weight_of(float value, float max) { return std::exp(double(value - max)); }

// All elements of x above some value, in no order, that together have at least `mass` of weight; all of x if rounding
// leaves less. A distribution is usually so peaked that a few hundred words above max - 4 are enough.
Candidates find_top_mass(const float* x, int64_t n, float max, double mass) {
    constexpr int kFoundAtOnce = 1024;
    int32_t found[kFoundAtOnce];
    Candidates candidates;
    for (const float threshold : {max - 4.0f, max - 8.0f, max - 16.0f, kMinusInfinity}) {
        candidates.clear();
        double sum = 0.0;
        for (int64_t position = 0; position < n;) {
            const int count = kernels().find_at_least(x, n, threshold, &position, found, kFoundAtOnce);
            for (int i = 0; i < count; ++i) {
                const float value = x[found[i]];
                candidates.push_back({value, found[i], weight_of(value, max)});
                sum += candidates.back().weight;
            }
        }
        if (sum >= mass) break;
    }
    return candidates;
}

// Cuts `candidates` down to the nucleus: those before which, in the order of goes_before, less than `mass` of weight
// lies, and always the first. Halves the range in which the last one must be; O(n) in all, no full sort.
void cut_to_nucleus(Candidates& candidates, double mass) {
    auto low = candidates.begin(), high = candidates.end();  // all before low is kept, all from high on is not
    double before_low = 0.0;
    while (high - low > 1) {
        const auto middle = low + (high - low) / 2;
        std::nth_element(low, middle, high, goes_before);
        double before_middle = before_low;
        for (auto c = low; c != middle; ++c) before_middle += c->weight;
        if (before_middle < mass) {  // the element at `middle` is kept
            low = middle;
            before_low = before_middle;
        } else {
            high = middle;
        }
    }
    candidates.erase(high, candidates.end());
}

}  // namespace

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
        candidates = find_top_k(x, n, top_k[row]);
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
