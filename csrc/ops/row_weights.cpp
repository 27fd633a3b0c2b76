#include "row_weights.h"

#include <algorithm>
#include <cmath>

#include "pace/threading.h"
#include "row_sketch.h"

namespace pace {

namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kCaution = 2.5;     // standard errors; each retry quadruples them
constexpr double kNoTrust = 100.0;   // with this many standard errors or more, all elements are listed
constexpr int64_t kShortRow = 8192;  // up to this length all elements are listed: a sample would be half of the row
constexpr double kRounding = 1e-3;   // rounding difference between keys for two levels, with a margin

template <class Body>
void for_pieces(int64_t n, const Body& body) {
    for (int64_t begin = 0; begin < n; begin += kSumBlock) body(begin, std::min(kSumBlock, n - begin));
}

}  // namespace

float weight_scale(float temperature) {
    return std::clamp(kLog2E / temperature, std::numeric_limits<float>::min(), std::numeric_limits<float>::max());
}

Survey survey(const float* x, int64_t n, float scale) {
    const KernelTable& table = kernels();
    Survey result;
    result.maxima.resize(size_t((n + kPeakBlock - 1) / kPeakBlock));
    result.max = kMinusInfinity;
    std::vector<float> peaks;  // for each piece; weights are relative to it until the row's maximum is known
    bool is_number = true;
    for_pieces(n, [&](int64_t begin, int64_t length) {
        float* const maxima = result.maxima.data() + begin / kPeakBlock;
        is_number &= table.block_peaks(x + begin, length, maxima);
        const float peak = *std::max_element(maxima, maxima + (length + kPeakBlock - 1) / kPeakBlock);
        result.max = std::max(result.max, peak);
        if (scale == 0.0f) return;
        result.sums.push_back(std::isfinite(peak) ? table.sum_weights(x + begin, length, peak, scale, nullptr) : 0.0);
        peaks.push_back(peak);
    });
    if (!is_number) result.max = std::numeric_limits<float>::quiet_NaN();
    for (size_t i = 0; i < result.sums.size(); ++i) {
        if (result.sums[i] <= 0.0) continue;
        result.total += result.sums[i] *= std::exp2(double(peaks[i] - result.max) * scale);
    }
    return result;
}

RowWeights::RowWeights(const float* x, int64_t n, float scale, const Survey& survey)
    : x_(x), n_(n), scale_(scale), survey_(survey) {}

float RowWeights::key_of(float x) const { return typical_ ? -std::fabs((x - survey_.max) * scale_ - level_) : x; }

void RowWeights::keep_all() {
    sums_ = survey_.sums;
    total_ = survey_.total;
}

// The smallest element whose weight is at least min_p. For a min_p of 1, the weight only has to round to 1 in fp64.
float RowWeights::least_likely(float min_p) const {
    const double t = std::min(0.0, std::log2(double(min_p))) - 0x1p-53;
    return std::max(kLowest, float(survey_.max + t / scale_));
}

void RowWeights::keep_likely(float min_p) {
    typical_ = false;
    cut_ = {least_likely(min_p), kLastIndex};
    sums_.clear();
    total_ = 0.0;
    const KeyLimits limits = {false, 0.0f, cut_.least, cut_.least};
    for_pieces(n_, [&](int64_t begin, int64_t length) {
        double sum = 0.0;
        for_runs(begin, length, limits, [&](int64_t from, int64_t run, bool reaches) {
            if (reaches) sum += kernels().sum_likely(x_ + from, run, survey_.max, scale_, cut_.least);
        });
        sums_.push_back(sum);
        total_ += sum;
    });
}

void RowWeights::keep_nucleus(double top_p) {
    typical_ = false;
    keep_share(top_p);
}

void RowWeights::keep_typical(double mass) {
    typical_ = true;
    keep_share(mass);
}

void RowWeights::keep_share(double share) {
    for (double caution = n_ <= kShortRow ? kNoTrust : kCaution; caution < kNoTrust; caution *= 4) {
        const RowSketch sketch(x_, n_, scale_, survey_);
        KeyLimits limits = sketch.limits(typical_, all_ > 0.0 ? &level_ : nullptr, share, caution);
        if (!typical_) {
            limits.sure = survey_.max + limits.sure / scale_;
            limits.least = std::max(kLowest, survey_.max + limits.least / scale_);
        }
        if (cut_between(limits, share)) return;
    }
    cut_between({typical_, 0.0f, kInfinity, kLowest}, share);
}

// Finds the cut in one pass; returns false if it is not between the limits.
bool RowWeights::cut_between(const KeyLimits& limits, double share) {
    const int64_t length = round_up(n_ + 16, 16);
    Near near;
    near.found = static_cast<int32_t*>(thread_scratch(size_t(3 * length) * sizeof(float)));
    near.keys = reinterpret_cast<float*>(near.found + length);
    near.weights = near.keys + length;
    split(limits, &near);
    const bool lists_all = limits.sure == kInfinity && limits.least == kLowest;
    const double mass = share * all_ - near.sure;
    const int64_t count = near.ends.back();
    if (!lists_all && (count == 0 || (near.sure > 0.0 && mass <= 0.0))) return false;
    const KeyedList listed = list(near);
    if (limits.least != kLowest && listed.weight_from(kLowest) < mass) return false;
    // Bounds the difference between keys for the exact level and keys for the limits' level.
    const float error = typical_ && !lists_all ? std::fabs(limits.level - level_) + kRounding : 0.0f;
    float low = limits.least - error, high = limits.sure + error;
    if (limits.least == kLowest || limits.sure == kInfinity) {
        const auto [least, most] = std::minmax_element(listed.key, listed.key + count);
        low = *least;
        high = std::nextafter(*most, kInfinity);
    }
    cut_ = find_cut(listed, mass, low, high);
    if (error > 0.0f && (cut_.least < limits.least + error || cut_.least > limits.sure - error)) return false;
    if (typical_) cut_.last = kLastIndex;  // all elements as close to the level are kept
    add_kept(listed, near.ends);
    return true;
}

// Sums and lists the elements as the limits define. The first call also sums all weights.
void RowWeights::split(const KeyLimits& limits, Near* near) {
    const KernelTable& table = kernels();
    const bool sums_all = all_ == 0.0;
    int64_t count = 0;
    double surplus = 0.0;
    sums_.clear();
    for_pieces(n_, [&](int64_t begin, int64_t length) {
        double sure = 0.0;
        for_runs(begin, length, limits, [&](int64_t from, int64_t run, bool reaches) {
            WeightSums sums = {};
            if (reaches) {
                sums = table.split_weights(x_ + from, run, survey_.max, scale_, limits, int32_t(from),
                                           near->found + count);
            } else if (sums_all) {
                sums.all = table.sum_weights(x_ + from, run, survey_.max, scale_, typical_ ? &sums.surplus : nullptr);
            }
            count += sums.found;
            sure += sums.sure;
            surplus += sums.surplus;
            if (sums_all) all_ += sums.all;
        });
        sums_.push_back(sure);
        near->ends.push_back(count);
        near->sure += sure;
    });
    if (sums_all) level_ = float(surplus / all_);
}

// True if a block may have elements with key >= limits.least.
bool RowWeights::reaches(int64_t begin, const KeyLimits& limits) const {
    const float x = survey_.maxima[size_t(begin / kPeakBlock)];
    if (!limits.typical) return x >= limits.least;
    // If the largest element is above the level, others in the block may be close to it.
    return (x - survey_.max) * scale_ - limits.level >= limits.least;
}

// Calls body(begin, length, reaches) for the blocks of a piece; consecutive blocks with equal `reaches` share a call.
template <class Body>
void RowWeights::for_runs(int64_t begin, int64_t length, const KeyLimits& limits, const Body& body) const {
    const int64_t end = begin + length;
    while (begin < end) {
        const bool reached = reaches(begin, limits);
        int64_t to = begin + kPeakBlock;
        while (to < end && reaches(to, limits) == reached) to += kPeakBlock;
        body(begin, std::min(to, end) - begin, reached);
        begin = to;
    }
}

// The keys and weights of the listed elements.
KeyedList RowWeights::list(const Near& near) const {
    const int64_t count = near.ends.back();
    float* const keys = near.keys;
    for (int64_t i = 0; i < count; ++i) keys[i] = x_[near.found[i]];
    kernels().weigh(keys, count, survey_.max, scale_, near.weights);
    const float shift = survey_.max, scale = scale_, level = level_;
    for (int64_t i = 0; typical_ && i < count; ++i) keys[i] = -std::fabs((keys[i] - shift) * scale - level);
    return {keys, near.weights, near.found, count};
}

// Adds the kept elements of a list to the sums of the pieces.
void RowWeights::add_kept(const KeyedList& near, const std::vector<int64_t>& ends) {
    total_ = 0.0;
    int64_t begin = 0;
    for (size_t piece = 0; piece < ends.size(); ++piece) {
        const KeyedList part = {near.key + begin, near.weight + begin, nullptr, ends[piece] - begin};
        double sum = part.weight_from(cut_.least);
        if (int64_t(piece + 1) * kSumBlock > cut_.last &&
            sum > part.weight_from(std::nextafter(cut_.least, kInfinity))) {  // some keys equal cut_.least
            for (int64_t i = begin; i < ends[piece]; ++i) {
                if (near.key[i] == cut_.least && near.index[i] > cut_.last) sum -= near.weight[i];
            }
        }
        total_ += sums_[piece] += std::max(sum, 0.0);
        begin = ends[piece];
    }
}

void RowWeights::copy_kept(std::vector<float>* elements, std::vector<int32_t>* indices) const {
    indices->resize(size_t(n_ + 16));
    int64_t count = 0;
    const auto copy = [&](int64_t begin, int64_t end, float least) {
        count +=
            kernels().find_between(x_ + begin, end - begin, least, kInfinity, int32_t(begin), indices->data() + count);
    };
    const float beyond =
        std::nextafter(cut_.least, kInfinity);  // for indices after cut_.last: drop elements equal to cut_.least
    for_pieces(n_, [&](int64_t begin, int64_t length) {
        const int64_t end = begin + length, middle = std::clamp<int64_t>(int64_t(cut_.last) + 1, begin, end);
        if (begin < middle) copy(begin, middle, cut_.least);
        if (middle < end) copy(middle, end, beyond);
    });
    elements->resize(size_t(count));
    for (int64_t i = 0; i < count; ++i) (*elements)[size_t(i)] = x_[(*indices)[size_t(i)]];
}

int64_t RowWeights::draw(double uniform) const {
    const double wanted = uniform * total_;
    double sum = 0.0;
    int64_t last = -1;
    size_t end = sums_.size();
    while (end > 1 && sums_[end - 1] <= 0.0) --end;
    for (size_t piece = 0; piece < end; ++piece) {
        if (sum + sums_[piece] <= wanted && piece + 1 < end) {
            sum += sums_[piece];
            continue;
        }
        // A piece's sum and the sum of its single elements differ by rounding, so the search may have to continue.
        const int64_t drawn = draw_from_piece(int64_t(piece) * kSumBlock, wanted, &sum, &last);
        if (drawn >= 0) return drawn;
    }
    for (int64_t i = n_ - 1; last < 0 && i >= 0; --i) {
        float weight;
        kernels().weigh(x_ + i, 1, survey_.max, scale_, &weight);
        if (weight > 0.0f && cut_.keeps(key_of(x_[i]), int32_t(i))) last = i;
    }
    return last;
}

// The element at which the sum exceeds `wanted`; -1 if there is none. `last` becomes the last kept element that was
// visited.
int64_t RowWeights::draw_from_piece(int64_t begin, double wanted, double* sum, int64_t* last) const {
    float weights[kPeakBlock];
    for (const int64_t end = std::min(n_, begin + kSumBlock); begin < end; begin += kPeakBlock) {
        const int64_t length = std::min(kPeakBlock, end - begin);
        const bool is_beyond = begin > cut_.last;  // elements equal to cut_.least are dropped here
        if (is_beyond || begin + length - 1 <= cut_.last) {
            const float least = is_beyond ? std::nextafter(cut_.least, kInfinity) : cut_.least;
            const KeyLimits limits = {typical_, level_, least, least};
            const KernelTable& table = kernels();
            const double kept =
                typical_ ? table.split_weights(x_ + begin, length, survey_.max, scale_, limits, 0, nullptr).sure
                         : table.sum_likely(x_ + begin, length, survey_.max, scale_, least);
            if (*sum + kept <= wanted) {
                *sum += kept;
                continue;
            }
        }
        kernels().weigh(x_ + begin, length, survey_.max, scale_, weights);
        for (int64_t i = 0; i < length; ++i) {
            if (weights[i] <= 0.0f || !cut_.keeps(key_of(x_[begin + i]), int32_t(begin + i))) continue;
            *last = begin + i;
            if ((*sum += weights[i]) > wanted) return begin + i;
        }
    }
    return -1;
}

}  // namespace pace
