#include "row_sketch.h"

#include <algorithm>
#include <cmath>

#include "pace/threading.h"

namespace pace {

namespace {

constexpr int64_t kPieces = 128, kPiece = 16;  // pieces of the sample: a cache line each
constexpr int64_t kSample = kPieces * kPiece;
constexpr int64_t kMaxLargest = kSample;
constexpr size_t kPeaks = 32;       // number of blocks in which the largest elements are searched
constexpr double kImprecise = 0.1;  // relative error of the weight of a sample that misses the largest
constexpr int64_t kNarrow = 16;     // up to 1 / 16 of the elements may be between narrow limits
constexpr float kWidest = 40.0f;    // range of t: 2^-40 times the largest weight is never near a cut
constexpr int kHalvings = 12;       // halvings of that range
constexpr double kRounding = 1e-5;  // bounds the rounding of sums
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Writes all elements of the row that are at least the returned threshold. Returns infinity and writes none if they are
// more than kMaxLargest.
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
        if (*count + more > kMaxLargest) {
            *count = 0;
            return kInfinity;
        }
        for (int i = 0; i < more; ++i) largest[(*count)++] = part[found[i]];
    }
    return threshold;
}

}  // namespace

RowSketch::RowSketch(int64_t n, float scale, const Survey* survey) : survey_(survey), n_(n), scale_(scale) {
    constexpr int64_t kSize = kSample + kMaxLargest;
    x_ = static_cast<float*>(thread_scratch(5 * kSize * sizeof(float)));
    t_ = x_ + kSize;
    weight_ = t_ + kSize;
    variance_ = weight_ + kSize;
    key_ = variance_ + kSize;
}

RowSketch::RowSketch(const float* x, int64_t n, float scale) : RowSketch(n, scale, nullptr) {
    take_sample(x);
    shift_ = *std::max_element(x_, x_ + kSample);
    weigh(kSample, 0);
}

RowSketch::RowSketch(const float* x, int64_t n, float scale, const Survey& survey) : RowSketch(n, scale, &survey) {
    shift_ = survey.max;
    take_sample(x);
    weigh(kSample, 0);
    const double total = list(weight_).weight_from(kLowest);
    if (is_precise() && std::fabs(total - survey.total) <= kImprecise * survey.total) return;
    int64_t num_largest, num_sampled = 0;
    const float threshold = find_largest(x, n, survey, x_ + kSample, &num_largest);
    for (int64_t i = 0; i < kSample; ++i) {
        const bool is_known = x_[i] >= threshold;
        x_[i] = is_known ? kMinusInfinity : x_[i];
        num_sampled += !is_known;
    }
    weigh(num_sampled, num_largest);
}

void RowSketch::take_sample(const float* x) {
    const auto from = [&](int64_t piece) { return x + piece * (n_ - kPiece) / (kPieces - 1); };
    for (int64_t piece = 0; piece < kPieces; ++piece) __builtin_prefetch(from(piece));
    for (int64_t piece = 0; piece < kPieces; ++piece) std::copy_n(from(piece), kPiece, x_ + piece * kPiece);
}

// Each element of the sample represents its share of the row without the largest elements.
void RowSketch::weigh(int64_t num_sampled, int64_t num_largest) {
    size_ = kSample + num_largest;
    const float factor = num_sampled ? float(n_ - num_largest) / float(num_sampled) : 0.0f;
    kernels().weigh(x_, size_, shift_, scale_, weight_);
    for (int64_t i = 0; i < kSample; ++i) {
        weight_[i] *= factor;
        variance_[i] = weight_[i] * weight_[i];
    }
    for (int64_t i = kSample; i < size_; ++i) variance_[i] = 0.0f;
    for (int64_t i = 0; i < size_; ++i) key_[i] = t_[i] = std::max((x_[i] - shift_) * scale_, -127.0f);
}

// Let K be the weight above a key in the sketch, and R the rest, with variances from their sampled parts. If the total
// of the row is known, K is one estimate, and the total less R is another. Each counts by the variance of the other.
// Else (1 - share) K - share R changes sign at the cut.
KeyLimits RowSketch::limits(bool typical, double share, double caution) {
    const float level = typical ? survey_->level : 0.0f;
    for (int64_t i = 0; typical && i < size_; ++i) key_[i] = -std::fabs(t_[i] - level);
    const KeyedList weights = list(weight_), variances = list(variance_);
    const double sum = weights.weight_from(kLowest), total = survey_ ? survey_->total : sum;
    const auto around = [&](double wanted) {
        Bracket bracket = {-kWidest, 1.0f, 0.0};
        bracket.narrow(weights, wanted, kHalvings);
        return bracket;
    };
    const double all = variances.weight_from(kLowest), kept = variances.weight_from(around(share * sum).low);
    const double above = survey_ && all > 0.0 ? kept / all : share;
    const double variance = (1 - above) * (1 - above) * kept + above * above * (all - kept);
    const double mass = share * total + above * (sum - total);
    const double error = caution * std::sqrt(variance) + kRounding * total;
    float sure = kInfinity, least = kLowest;
    if (mass - error > 0.0) sure = around(mass - error).high;
    if (mass + error < sum) least = around(mass + error).low;
    // All elements below this together have less than half of the weight that the cut drops.
    const float lowest = float(std::log2(0.5 * (1 - share) * total / double(n_)));
    if (!typical) least = std::max(least, lowest);
    const auto in_row = [&](float key) { return typical ? key / scale_ : shift_ + key / scale_; };
    return {typical, shift_ + level / scale_, sure < kInfinity ? in_row(sure) : sure,
            least > -kWidest ? std::max(kLowest, in_row(least)) : kLowest};
}

bool RowSketch::is_precise() const {
    const double sum = list(weight_).weight_from(kLowest);
    return list(variance_).weight_from(kLowest) <= kImprecise * kImprecise * sum * sum;
}

bool RowSketch::is_narrow(const KeyLimits& limits) const {
    if (!(limits.least > kLowest && limits.sure < kInfinity)) return false;
    int64_t count = 0;
    for (int64_t i = 0; i < size_; ++i) count += (x_[i] >= limits.least) & (x_[i] < limits.sure);
    return kNarrow * count <= size_;
}

}  // namespace pace
