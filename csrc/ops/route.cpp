// The choice of experts, row by row.
#include <algorithm>
#include <cmath>
#include <limits>

#include "pace/expert_ops.h"
#include "pace/ops.h"

namespace pace {

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLow = -std::numeric_limits<float>::infinity();
// Elements in a chunk: a few microseconds of work.
constexpr int64_t kElements = 4096;

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

bool has_nan(const float* x, int64_t n) {
    bool found = false;
    for (int64_t i = 0; i < n; ++i) found |= x[i] != x[i];
    return found;
}

// Index of the largest element that is not taken, the lowest among equals. If all are NaN or -inf, the first that is
// not taken.
int64_t best_of(const float* keys, const char* taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i) {
        if (!taken[i] && (best < 0 || keys[i] > keys[best])) best = i;
    }
    return best;
}

// Marks all experts as taken except those of the best groups.
void keep_groups(const Router& router, const float* keys, char* taken) {
    const int64_t size = router.experts / router.groups;
    for (int64_t kept = 0; kept < router.kept_groups; ++kept) {
        int64_t best = -1;
        float best_key = kLow;
        for (int64_t g = 0; g < router.groups; ++g) {
            if (!taken[g * size]) continue;
            float first = kLow, second = kLow;
            for (int64_t e = g * size; e < (g + 1) * size; ++e) {
                second = std::max(second, std::min(first, keys[e]));
                first = std::max(first, keys[e]);
            }
            const float key = router.group_top2 ? first + second : first;
            if (best < 0 || key > best_key) best = g, best_key = key;
        }
        std::fill_n(taken + best * size, size, 0);
    }
}

// Chooses the largest logit. Its weight is its softmax among logits within 2 jitter of it, relative to the larger in
// magnitude. Then does the same without the first choice.
void sparsemixer(const Router& router, const float* logits, char* taken, int64_t* chosen, float* weights) {
    for (int round = 0; round < 2; ++round) {
        const int64_t best = best_of(logits, taken, router.experts);
        const float top = logits[best];
        float sum = 0;
        for (int64_t e = 0; e < router.experts; ++e) {
            const float size = std::max(std::fabs(logits[e]), top);
            if (!taken[e] && !((top - logits[e]) / size > 2 * router.jitter)) sum += std::exp(logits[e] - top);
        }
        chosen[round] = best;
        weights[round] = 1 / sum;
        taken[best] = 1;
    }
}

}  // namespace

void Router::choose(const KernelTable& table, const float* logits, void* scratch, float* routing) const {
    float* const scores = static_cast<float*>(scratch);
    float* const keys = scores + experts;
    char* const taken = reinterpret_cast<char*>(keys + experts);
    float* const weights = routing + top_k;
    const float* score_of = logits;
    if (score == Score::Softmax) {
        table.softmax(logits, experts, table.exp_sum(logits, experts), scores);
        score_of = scores;
    } else if (score == Score::Sigmoid) {
        for (int64_t e = 0; e < experts; ++e) scores[e] = sigmoid(logits[e]);
        score_of = scores;
    }
    if (has_nan(score_of, experts)) {
        for (int64_t i = 0; i < top_k; ++i) routing[i] = float(i), weights[i] = kNaN;
        return;
    }

    int64_t chosen[kMaxTopK];
    std::fill_n(taken, experts, groups > 1);
    if (score == Score::Sparsemixer) {
        float found[2];
        sparsemixer(*this, logits, taken, chosen, found);
        const bool swap = chosen[1] < chosen[0];
        for (int i = 0; i < 2; ++i) routing[i] = float(chosen[swap ? 1 - i : i]), weights[i] = found[swap ? 1 - i : i];
        for (int i = 0; expert_scale && i < 2; ++i) weights[i] *= expert_scale[int64_t(routing[i])];
        return;
    }
    const float* key_of = score_of;
    if (choice_bias) {
        for (int64_t e = 0; e < experts; ++e) keys[e] = score_of[e] + choice_bias[e];
        key_of = keys;
    }
    if (groups > 1) keep_groups(*this, key_of, taken);
    for (int64_t i = 0; i < top_k; ++i) {
        chosen[i] = best_of(key_of, taken, experts);
        taken[chosen[i]] = 1;
    }
    std::sort(chosen, chosen + top_k);

    float sum = 0, top = kLow;
    for (int64_t i = 0; i < top_k; ++i) top = std::max(top, score_of[chosen[i]]);
    for (int64_t i = 0; i < top_k; ++i) {
        const float found = score_of[chosen[i]];
        weights[i] = score == Score::SoftmaxOfChosen   ? std::exp(found - top)
                     : score == Score::SigmoidOfChosen ? sigmoid(found)
                                                       : found;
        sum += weights[i];
    }
    const float divisor = normalise || score == Score::SoftmaxOfChosen ? std::max(sum + eps, least_sum) : 1;
    for (int64_t i = 0; i < top_k; ++i) {
        routing[i] = float(chosen[i]);
        weights[i] = weights[i] / divisor * scale;
        if (expert_scale) weights[i] *= expert_scale[chosen[i]];
    }
}

void RouteOp::prepare(int) {
    rows_per_chunk = std::max<int64_t>(1, kElements / router.experts);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void RouteOp::run(int, int64_t chunk, int) const {
    void* const scratch = thread_scratch(router.scratch_bytes());
    for (int64_t row = chunk * rows_per_chunk; row < std::min(rows, (chunk + 1) * rows_per_chunk); ++row)
        router.choose(kernels(), logits + row * logits_stride, scratch, routing + row * 2 * router.top_k);
}

}  // namespace pace
