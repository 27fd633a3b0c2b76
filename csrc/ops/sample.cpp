// Drawing tokens from rows of logits, and the log-probabilities of those drawn; a row is a chunk.
//
// A row with top_k has few candidates: they are found in one pass, and everything else is done to them. A row without is
// made weights in one pass, which filters then set to zero.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "candidates.h"
#include "pace/row_ops.h"
#include "pace/threading.h"

namespace pace {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- Few candidates

// Those whose information is closest to the entropy, up to `mass` of the weight; with all that are as close as the last.
void keep_typical(Candidates& candidates, double mass) {
    double total = 0.0, surplus = 0.0;
    for (const Candidate& c : candidates) total += c.weight;
    for (const Candidate& c : candidates) {
        if (c.weight > 0) surplus += c.weight * std::log(c.weight);
    }
    const double level = surplus / total;  // of the logarithm of a weight
    const auto distance = [&](const Candidate& c) { return std::fabs(std::log(c.weight) - level); };
    std::sort(candidates.begin(), candidates.end(),
              [&](const Candidate& a, const Candidate& b) { return distance(a) < distance(b); });
    double before = 0.0;
    size_t kept = 0;
    while (kept < candidates.size() && before < mass * total) before += candidates[kept++].weight;
    const double last = distance(candidates[std::max<size_t>(kept, 1) - 1]);
    while (kept < candidates.size() && distance(candidates[kept]) <= last) ++kept;
    candidates.resize(std::max<size_t>(kept, 1));
}

int64_t draw(Candidates& candidates, double uniform) {
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
    double total = 0.0, sum = 0.0;
    for (const Candidate& c : candidates) total += c.weight;
    int64_t last = -1;
    for (const Candidate& c : candidates) {
        if (c.weight <= 0) continue;
        last = c.index;
        if ((sum += c.weight) > uniform * total) break;
    }
    return last;
}

// ---- A whole row

// A row's weights, and their sums block by block.
struct Weights {
    const float* x;
    int64_t n;
    float temperature, shift;
    float *w, *key;            // [n]; key is scratch
    std::vector<double> sums;  // [ceil(n / kSumBlock)]
    double total;

    void keep(const float* keys, float least) { total = kernels().keep_keys(keys, w, n, least, sums.data()); }

    void drop(int32_t index) {
        sums[index / kSumBlock] -= w[index];
        total -= w[index];
        w[index] = 0.0f;
    }
};

// Elements of keys in [low, high], with their weights.
Candidates collect(const float* key, const float* w, int64_t n, float low, float high) {
    constexpr int kFoundAtOnce = 1024;
    int32_t found[kFoundAtOnce];
    Candidates candidates;
    for (int64_t position = 0; position < n;) {
        const int count = kernels().find_between(key, n, low, high, &position, found, kFoundAtOnce);
        for (int i = 0; i < count; ++i) candidates.push_back({key[found[i]], found[i], double(w[found[i]])});
    }
    return candidates;
}

double mass_of(const Candidates& candidates) {
    double sum = 0.0;
    for (const Candidate& c : candidates) sum += c.weight;
    return sum;
}

// Where a row is cut: the least key among the elements that come first, by falling key and then by rising index, until
// they have `mass`; and the elements with that key that come too late.
struct Cut {
    float least;
    std::vector<int32_t> late;
};

Cut cut_among(Candidates candidates, double mass) {
    Candidates kept = candidates;
    cut_to_nucleus(kept, mass);
    Cut cut = {kInfinity, {}};
    for (const Candidate& c : kept) cut.least = std::min(cut.least, c.value);
    int32_t last = -1;
    for (const Candidate& c : kept) {
        if (c.value == cut.least) last = std::max(last, c.index);
    }
    for (const Candidate& c : candidates) {
        if (c.value == cut.least && c.index > last) cut.late.push_back(c.index);
    }
    return cut;
}

// `total` is the weight of all. A sample of the keys says about where the cut lies: what is above is only summed, and
// what is near is looked at. The sample may be wrong, which is noticed: then more is near.
Cut find_cut(const float* key, const float* w, int64_t n, double total, double mass) {
    constexpr int kSample = 512;
    if (n <= 4 * kSample) return cut_among(collect(key, w, n, kMinusInfinity, kInfinity), mass);
    Candidates sample;
    for (int i = 0; i < kSample; ++i) {
        const int64_t at = i * n / kSample;
        sample.push_back({key[at], int32_t(at), double(w[at])});
    }
    std::sort(sample.begin(), sample.end(), goes_before);
    // Where the distribution is peaked, as a trained model's is, the first few of the sample are below all that matters.
    Candidates top = collect(key, w, n, sample[2].value, kInfinity);
    if (mass_of(top) >= mass) return cut_among(std::move(top), mass);

    const double share = mass / total * mass_of(sample);
    int place = 0;
    for (double before = 0.0; place < kSample && before < share; ++place) before += sample[place].weight;
    for (int margin = 16;; margin *= 4) {
        const float high = place < margin ? kInfinity : sample[place - margin].value;
        const float low = place + margin >= kSample ? kMinusInfinity : sample[place + margin].value;
        const double above = high == kInfinity ? 0.0 : kernels().sum_above(key, w, n, high);
        const bool is_all = high == kInfinity && low == kMinusInfinity;
        if (above >= mass && !is_all) continue;
        Candidates near = collect(key, w, n, low, high);
        const double around = mass_of(near);
        if (!is_all && low != kMinusInfinity && above + around < mass) continue;
        if (int64_t(near.size()) > n / 2) return cut_among(std::move(near), mass - above);
        std::vector<float> keys, weights;
        for (const Candidate& c : near) {
            keys.push_back(c.value);
            weights.push_back(float(c.weight));
        }
        Cut cut = find_cut(keys.data(), weights.data(), int64_t(keys.size()), around, mass - above);
        for (int32_t& index : cut.late) index = near[index].index;
        return cut;
    }
}

void keep_nucleus(Weights& weights, double top_p) {
    const Cut cut = find_cut(weights.w, weights.w, weights.n, weights.total, top_p * weights.total);
    weights.keep(weights.w, cut.least);
    for (const int32_t index : cut.late) weights.drop(index);
}

void keep_typical(Weights& weights, double mass) {
    const KernelTable& table = kernels();
    const double surplus = table.information(weights.x, weights.w, weights.n, weights.temperature, weights.shift);
    const float level = float(double(weights.shift) + surplus / weights.total);
    table.typicality(weights.x, weights.w, weights.n, weights.temperature, level, weights.key);
    weights.keep(weights.key, find_cut(weights.key, weights.w, weights.n, weights.total, mass * weights.total).least);
}

int64_t draw(const Weights& weights, double uniform) {
    const double wanted = uniform * weights.total;
    const int64_t blocks = int64_t(weights.sums.size());
    double sum = 0.0;
    int64_t block = 0, last = -1;
    while (block < blocks - 1 && sum + weights.sums[block] <= wanted) sum += weights.sums[block++];
    for (; block < blocks; ++block) {  // the sum of a block and that of its elements, one by one, differ by rounding
        const int64_t end = std::min(weights.n, (block + 1) * kSumBlock);
        for (int64_t i = block * kSumBlock; i < end; ++i) {
            if (weights.w[i] <= 0.0f) continue;
            last = i;
            if ((sum += weights.w[i]) > wanted) return last;
        }
    }
    for (int64_t i = weights.n - 1; last < 0 && i >= 0; --i) {
        if (weights.w[i] > 0.0f) last = i;
    }
    return last;
}

}  // namespace

void SampleOp::run(int, int64_t chunk, int) const {
    const KernelTable& table = kernels();
    const float* const x = logits + rows[chunk] * row_stride;
    const float heat = temperature[chunk];
    const int64_t largest = table.argmax(x, n);
    tokens[chunk] = -1;
    if (largest < 0 || x[largest] == kInfinity) return;
    if (heat == 0.0f) tokens[chunk] = largest;
    if (heat == 0.0f || x[largest] == -kInfinity) return;
    const float shift = x[largest] / heat;

    if (top_k[chunk] > 0 && top_k[chunk] < n) {
        Candidates candidates = find_top_k(x, n, top_k[chunk], heat);
        double total = 0.0;
        for (Candidate& c : candidates) {
            c.value /= heat;
            total += c.weight = weight_of(c.value, shift);
        }
        if (top_p[chunk] < 1.0f) cut_to_nucleus(candidates, double(top_p[chunk]) * total);
        if (min_p[chunk] > 0.0f) {
            const auto unlikely = [&](const Candidate& c) {
                return c.weight < double(min_p[chunk]) && c.index != largest;
            };
            candidates.erase(std::remove_if(candidates.begin(), candidates.end(), unlikely), candidates.end());
        }
        if (typical_p[chunk] < 1.0f) keep_typical(candidates, typical_p[chunk]);
        tokens[chunk] = draw(candidates, uniform[chunk]);
        return;
    }

    float* const scratch = static_cast<float*>(thread_scratch(2 * round_up(n, 16) * sizeof(float)));
    Weights weights = {
        x,  n, heat, shift, scratch, scratch + round_up(n, 16), std::vector<double>((n + kSumBlock - 1) / kSumBlock),
        0.0};
    weights.total = table.weigh(x, n, heat, shift, weights.w, weights.sums.data());
    if (top_p[chunk] < 1.0f) keep_nucleus(weights, top_p[chunk]);
    if (min_p[chunk] > 0.0f) weights.keep(weights.w, std::min(min_p[chunk], 1.0f));
    if (typical_p[chunk] < 1.0f) keep_typical(weights, typical_p[chunk]);
    tokens[chunk] = draw(weights, uniform[chunk]);
}

void LogprobsOp::run(int, int64_t chunk, int) const {
    const float* const x = logits + rows[chunk] * row_stride;
    const ExpSum total = kernels().exp_sum(x, n);
    const float log_sum = float(std::log(total.sum));
    const auto logprob = [&](float value) { return (value - total.max) - log_sum; };
    logprobs[chunk] = logprob(x[tokens[chunk]]);
    Candidates candidates;
    if (top > 0) {
        candidates = find_top_k(x, n, std::min(top, n));
        std::sort(candidates.begin(), candidates.end(), goes_before);
    }
    for (int64_t i = 0; i < top; ++i) {
        const bool is_there = i < int64_t(candidates.size());
        top_tokens[chunk * top + i] = is_there ? candidates[i].index : -1;
        top_logprobs[chunk * top + i] = is_there ? logprob(candidates[i].value) : -kInfinity;
    }
}

}  // namespace pace
