#include "row_sketch.h"

#include <algorithm>
#include <cmath>

#include "cuts.h"
#include "pace/threading.h"

namespace pace {

namespace {

constexpr int64_t kPieces = 128, kPiece = 16;  // pieces of the sample: a cache line each
constexpr int64_t kMaxKept = kPieces * kPiece;
constexpr size_t kPeaks = 32;     // number of blocks in which the largest elements are searched
constexpr float kWidest = 40.0f;  // range of t: 2^-40 times the largest weight is never near a cut
constexpr int kHalvings = 12;     // halvings of that range
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Writes all elements of the row that are at least the returned threshold. Returns infinity and writes none if they are
// more than kMaxKept.
float find_largest(const float* x, int64_t n, const Survey& survey, float* largest, int64_t* count) {
    *count = 0;
    if (survey.maxima.size() <= kPeaks) return kInfinity;
    std::vector<float> order = survey.maxima;
    std::nth_element(order.begin(), order.begin() + kPeaks, order.end(), std::greater<float>());
    const float threshold = std::max(order[kPeaks], kLowest);
    int32_t found[2 * kPeakBlock];
    for (size_t block = 0; block < survey.maxima.size(); ++block) {
        if (survey.maxima[block] < threshold) continue;
        const float* const part = x + int64_t(block) * kPeakBlock;
        const int64_t length = std::min(kPeakBlock, n - int64_t(block) * kPeakBlock);
        int64_t position = 0;
        const int more = kernels().find_at_least(part, length, threshold, &position, found, 2 * kPeakBlock);
        if (*count + more > kMaxKept) {
            *count = 0;
            return kInfinity;
        }
        for (int i = 0; i < more; ++i) largest[(*count)++] = part[found[i]];
    }
    return threshold;
}

}  // namespace

RowSketch::RowSketch(const float* x, int64_t n, float scale, const Survey& survey) : survey_(survey), n_(n) {
    float* const values = static_cast<float*>(thread_scratch(5 * 2 * kMaxKept * sizeof(float)));
    t_ = values + 2 * kMaxKept;
    weight_ = t_ + 2 * kMaxKept;
    variance_ = weight_ + 2 * kMaxKept;
    key_ = variance_ + 2 * kMaxKept;
    int64_t largest;
    const float threshold = find_largest(x, n, survey, values, &largest);
    size_ = largest + kMaxKept;
    int64_t sampled = 0;
    for (int64_t piece = 0; piece < kPieces; ++piece) {
        const float* const from = x + piece * (n - kPiece) / (kPieces - 1);
        float* const to = values + largest + piece * kPiece;
        for (int64_t i = 0; i < kPiece; ++i) to[i] = from[i] < threshold ? from[i] : kMinusInfinity;
        for (int64_t i = 0; i < kPiece; ++i) sampled += from[i] < threshold;
    }
    const float factor = sampled ? float(n - largest) / float(sampled) : 0.0f;  // elements that each sample represents
    kernels().weigh(values, size_, survey.max, scale, weight_);
    for (int64_t i = 0; i < largest; ++i) variance_[i] = 0.0f;
    for (int64_t i = largest; i < size_; ++i) {
        weight_[i] *= factor;
        variance_[i] = weight_[i] * weight_[i];
    }
    for (int64_t i = 0; i < size_; ++i) t_[i] = std::max((values[i] - survey.max) * scale, -127.0f);
}

// The mean of t, weighted, and its standard error.
float RowSketch::find_level(double* error) const {
    double sum = 0.0, surplus = 0.0, variance = 0.0;
    for (int64_t i = 0; i < size_; ++i) {
        sum += weight_[i];
        surplus += weight_[i] * t_[i];
    }
    const float level = float(surplus / sum);
    for (int64_t i = 0; i < size_; ++i) variance += variance_[i] * (t_[i] - level) * (t_[i] - level);
    *error = std::sqrt(variance) / sum;
    return level;
}

KeyLimits RowSketch::limits(bool typical, const float* level, double share, double caution) const {
    KeyLimits limits = {typical, 0.0f, kInfinity, kLowest};
    double level_error = 0.0;
    if (typical) limits.level = level ? *level : find_level(&level_error);
    for (int64_t i = 0; typical && i < size_; ++i) key_[i] = -std::fabs(t_[i] - limits.level);
    const float* const key = typical ? key_ : t_;
    const KeyedList weights = {key, weight_, nullptr, size_}, variances = {key, variance_, nullptr, size_};
    const double total = weights.weight_from(kLowest), mass = share * total;
    const auto around = [&](double wanted) {
        Bracket bracket = {-kWidest, 1.0f, 0.0};
        bracket.narrow(weights, wanted, kHalvings);
        return bracket;
    };
    // Let K be the weight kept above a key, and R the rest. (1 - share) K - share R changes sign at the cut. Its error
    // comes from the sampled parts of K and R.
    const double all = variances.weight_from(kLowest), kept = variances.weight_from(around(mass).low);
    const double error = caution * std::sqrt((1 - share) * (1 - share) * kept + share * share * (all - kept));
    if (mass - error > 0.0) limits.sure = around(mass - error).high + float(caution * level_error);
    if (mass + error < total) limits.least = around(mass + error).low - float(caution * level_error);
    if (limits.least <= -kWidest) limits.least = kLowest;
    // All elements below this together have less than half of the weight that the cut drops.
    const float lowest = float(std::log2(0.5 * (1 - share) * total / double(n_)));
    if (!typical) limits.least = std::max(limits.least, lowest);
    return limits;
}

}  // namespace pace
