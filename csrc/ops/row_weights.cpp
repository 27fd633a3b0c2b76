#include "row_weights.h"

#include <algorithm>
#include <cmath>

#include "pace/threading.h"
#include "row_sketch.h"

namespace pace {

namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kCaution = 2.5;     // standard errors; the next try has four times as many
constexpr double kNoTrust = 100.0;   // from here on all is listed
constexpr int64_t kShortRow = 8192;  // up to here all is listed: a sample would be half of it

// Lists as long as a row can be, and a vector more.
struct Lists {
    int32_t* found;
    float *keys, *weights;

    explicit Lists(int64_t n) {
        const int64_t length = round_up(n + 16, 16);
        found = static_cast<int32_t*>(thread_scratch(size_t(3 * length) * sizeof(float)));
        keys = reinterpret_cast<float*>(found + length);
        weights = keys + length;
    }
};

template <class Body>
void for_pieces(int64_t n, const Body& body) {
    for (int64_t begin = 0; begin < n; begin += kSumBlock) body(begin, std::min(kSumBlock, n - begin));
}

}  // namespace

float weight_scale(float temperature) {
    return std::clamp(kLog2E / temperature, std::numeric_limits<float>::min(), std::numeric_limits<float>::max());
}

Survey survey(const float* x, int64_t n, float scale, bool wants_level) {
    const KernelTable& table = kernels();
    Survey result;
    result.maxima.resize(size_t((n + kPeakBlock - 1) / kPeakBlock));
    result.max = kMinusInfinity;
    std::vector<float> peaks, surplus;  // of pieces; their weights are relative to the peak until all are known
    bool is_number = true;
    for_pieces(n, [&](int64_t begin, int64_t length) {
        float* const maxima = result.maxima.data() + begin / kPeakBlock;
        is_number &= table.block_peaks(x + begin, length, maxima);
        const float peak = *std::max_element(maxima, maxima + (length + kPeakBlock - 1) / kPeakBlock);
        result.max = std::max(result.max, peak);
        if (scale == 0.0f) return;
        float more = 0.0f;
        const bool is_any = std::isfinite(peak);
        result.sums.push_back(is_any ? table.sum_weights(x + begin, length, peak, scale, wants_level ? &more : nullptr)
                                     : 0.0);
        peaks.push_back(peak);
        surplus.push_back(more);
    });
    if (!is_number) result.max = std::numeric_limits<float>::quiet_NaN();
    double all_surplus = 0.0;
    for (size_t i = 0; i < result.sums.size(); ++i) {
        if (result.sums[i] <= 0.0) continue;
        const double below = double(peaks[i] - result.max) * scale, factor = std::exp2(below);
        all_surplus += factor * (surplus[i] + std::max(below, -1e4) * result.sums[i]);
        result.total += result.sums[i] *= factor;
    }
    result.level = float(all_surplus / result.total);
    return result;
}

RowWeights::RowWeights(const float* x, int64_t n, float scale, const Survey& survey)
    : x_(x), n_(n), scale_(scale), survey_(survey) {}

float RowWeights::key_of(float x) const {
    return typical_ ? -std::fabs((x - survey_.max) * scale_ - survey_.level) : x;
}

void RowWeights::keep_all() {
    sums_ = survey_.sums;
    total_ = survey_.total;
}

// The least element of such a weight; with a min_p of 1, those whose weight is 1 when rounded to fp64.
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
        const WeightSums sums =
            kernels().split_weights(x_ + begin, length, survey_.max, scale_, limits, int32_t(begin), nullptr);
        sums_.push_back(sums.sure);
        total_ += sums.sure;
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
    for (double caution = n_ <= kShortRow ? kNoTrust : kCaution;; caution *= 4) {
        KeyLimits limits = {typical_, survey_.level, kInfinity, kLowest};
        if (caution < kNoTrust) {
            const RowSketch sketch(x_, n_, scale_, survey_);
            limits = sketch.limits(typical_, survey_.level, share, caution);
            if (!typical_) {
                limits.sure = survey_.max + limits.sure / scale_;
                limits.least = std::max(kLowest, survey_.max + limits.least / scale_);
            }
        }
        if (cut_between(limits, share)) return;
    }
}

// Finds the cut by one pass, if it is between the limits.
bool RowWeights::cut_between(const KeyLimits& limits, double share) {
    const Lists lists(n_);
    std::vector<int64_t> ends;  // of the pieces, in the list of what is between
    int64_t count = 0;
    double all = 0.0, sure = 0.0;
    sums_.clear();
    for_pieces(n_, [&](int64_t begin, int64_t length) {
        const WeightSums sums = kernels().split_weights(x_ + begin, length, survey_.max, scale_, limits, int32_t(begin),
                                                        lists.found + count);
        sums_.push_back(sums.sure);
        ends.push_back(count += sums.found);
        sure += sums.sure;
        all += sums.all;
    });
    const bool lists_all = limits.sure == kInfinity && limits.least == kLowest;
    if (!lists_all && (count == 0 || (sure > 0.0 && sure >= share * all))) return false;
    const KeyedList near = list(lists.found, count, lists.keys, lists.weights);
    if (limits.least != kLowest && sure + near.weight_from(kLowest) < share * all) return false;
    float low = limits.least, high = limits.sure;
    if (low == kLowest || high == kInfinity) {
        const auto [least, most] = std::minmax_element(near.key, near.key + count);
        low = *least;
        high = std::nextafter(*most, kInfinity);
    }
    cut_ = find_cut(near, share * all - sure, low, high);
    if (typical_) cut_.last = kLastIndex;  // with all that are as close
    add_kept(near, ends);
    return true;
}

// Of elements: their keys and weights.
KeyedList RowWeights::list(const int32_t* indices, int64_t count, float* keys, float* weights) const {
    for (int64_t i = 0; i < count; ++i) keys[i] = x_[indices[i]];
    kernels().weigh(keys, count, survey_.max, scale_, weights);
    const float shift = survey_.max, scale = scale_, level = survey_.level;
    for (int64_t i = 0; typical_ && i < count; ++i) keys[i] = -std::fabs((keys[i] - shift) * scale - level);
    return {keys, weights, indices, count};
}

// Adds what the cut keeps of a list to the sums of the pieces.
void RowWeights::add_kept(const KeyedList& near, const std::vector<int64_t>& ends) {
    total_ = 0.0;
    int64_t begin = 0;
    for (size_t piece = 0; piece < ends.size(); ++piece) {
        const KeyedList part = {near.key + begin, near.weight + begin, nullptr, ends[piece] - begin};
        double sum = part.weight_from(cut_.least);
        if (int64_t(piece + 1) * kSumBlock > cut_.last &&
            sum > part.weight_from(std::nextafter(cut_.least, kInfinity))) {  // some equal the last one
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
        const KeyLimits limits = {false, 0.0f, kInfinity, least};
        count += kernels()
                     .split_weights(x_ + begin, end - begin, survey_.max, scale_, limits, int32_t(begin),
                                    indices->data() + count)
                     .found;
    };
    const float beyond = std::nextafter(cut_.least, kInfinity);  // where what equals the last one is not kept
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
        // The sum of a piece and that of its elements, one by one, differ by rounding: the search may go on.
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

// The element at which the sum exceeds what is wanted; -1 if none does. `last` is the last one kept that was looked at.
int64_t RowWeights::draw_from_piece(int64_t begin, double wanted, double* sum, int64_t* last) const {
    float weights[kPeakBlock];
    for (const int64_t end = std::min(n_, begin + kSumBlock); begin < end; begin += kPeakBlock) {
        const int64_t length = std::min(kPeakBlock, end - begin);
        const bool is_beyond = begin > cut_.last;  // where what equals the last one is not kept
        if (is_beyond || begin + length - 1 <= cut_.last) {
            const float least = is_beyond ? std::nextafter(cut_.least, kInfinity) : cut_.least;
            const KeyLimits limits = {typical_, survey_.level, least, least};
            const double kept =
                kernels().split_weights(x_ + begin, length, survey_.max, scale_, limits, 0, nullptr).sure;
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
