#include "row_weights.h"

#include <algorithm>
#include <cmath>

#include "pace/threading.h"
#include "row_sketch.h"

namespace pace {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kNoTrust = 100.0;  // with this many standard errors or more, all elements are listed
constexpr float kRounding = 1e-4f;  // bounds the rounding of t near a cut, and of its distance to the level

float after(float x) { return std::nextafter(x, kInfinity); }

}  // namespace

RowWeights::RowWeights(const float* x, int64_t n, float scale, const Survey& survey)
    : x_(x), n_(n), scale_(scale), survey_(survey) {}

// Keys, which are in terms of t for typical tokens.
void RowWeights::write_keys(const float* x, int64_t count, float* keys) const {
    const float max = survey_.max, scale = scale_, level = survey_.level;
    for (int64_t i = 0; i < count; ++i) keys[i] = typical_ ? -std::fabs((x[i] - max) * scale - level) : x[i];
}

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
        for_runs(begin, length, limits, [&](int64_t from, int64_t run) {
            sum += kernels().sum_likely(x_ + from, run, survey_.max, scale_, cut_.least);
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
    if (!survey_.split.ends.empty() && cut_at(survey_.split, share)) return;
    for (double caution = n_ <= kShortRow ? kNoTrust : kCaution; caution < kNoTrust; caution *= 4) {
        if (cut_at(split_at(RowSketch(x_, n_, scale_, survey_).limits(typical_, share, caution)), share)) return;
    }
    cut_at(split_at({typical_, survey_.max, kInfinity, kLowest}), share);
}

// Finds the cut; returns false if it is not between the limits.
bool RowWeights::cut_at(const Split& split, double share) {
    const KeyLimits& limits = split.limits;
    const int64_t count = split.ends.back();
    float* const keys = Split::list(n_);
    float* const weights = static_cast<float*>(thread_scratch(size_t(count + 1) * sizeof(float)));
    kernels().weigh(keys, count, survey_.max, scale_, weights);
    write_keys(keys, count, keys);
    const KeyedList list = {keys, weights, nullptr, count};
    double sure = 0.0;
    for (const double sum : split.sums) sure += sum;
    const double mass = share * survey_.total - sure;
    if (count == 0 || (sure > 0.0 && mass <= 0.0)) return false;
    if (limits.least > kLowest && list.weight_from(kLowest) < mass) return false;
    // For typical tokens the limits are in terms of x and keys in terms of t.
    const float unit = typical_ ? scale_ : 1.0f;
    const float error = typical_ ? std::fabs((limits.centre - survey_.max) * scale_ - survey_.level) + kRounding : 0.0f;
    float low = limits.least * unit, high = limits.sure * unit;
    const bool has_low = limits.least > kLowest, has_high = limits.sure < kInfinity;
    const auto [least, most] = std::minmax_element(list.key, list.key + (has_low && has_high ? 1 : count));
    const Cut cut = find_cut(list, mass, has_low ? low - error : *least, has_high ? high + error : after(*most));
    if (has_low && !(cut.least >= low + error)) return false;
    if (has_high && !(cut.least <= high - error)) return false;
    cut_ = cut;
    if (typical_) cut_.last = kLastIndex;  // all elements as close to the level are kept
    add_kept(list, split);
    if (cut_.last != kLastIndex) cut_.last = index_of(cut_.last, split);
    return true;
}

Split RowWeights::split_at(const KeyLimits& limits) const {
    Split split = {limits, {}, {}};
    float* const near = Split::list(n_);
    int64_t count = 0;
    for_pieces(n_, [&](int64_t begin, int64_t length) {
        float maxima[kSumBlock / kPeakBlock];
        double sum = 0.0;
        for_runs(begin, length, limits, [&](int64_t from, int64_t run) {
            const PieceSums own =
                kernels().survey_piece(x_ + from, run, survey_.max, scale_, false, &limits, maxima, near + count);
            sum += own.sure;
            count += own.near;
        });
        split.sums.push_back(sum);
        split.ends.push_back(count);
    });
    return split;
}

// The index in the row of an element of the list. The key must be x.
int32_t RowWeights::index_of(int32_t place, const Split& split) const {
    const int64_t piece = std::upper_bound(split.ends.begin(), split.ends.end(), place) - split.ends.begin();
    const int64_t before = piece ? split.ends[size_t(piece) - 1] : 0, begin = piece * kSumBlock;
    int32_t found[kSumBlock + 16];
    kernels().find_between(x_ + begin, std::min(kSumBlock, n_ - begin), split.limits.least, split.limits.sure,
                           int32_t(begin), found);
    return found[place - before];
}

// True if a block may have elements with key >= limits.least.
bool RowWeights::reaches(int64_t begin, const KeyLimits& limits) const {
    const float x = survey_.maxima[size_t(begin / kPeakBlock)];
    // If the largest element is above the centre, others in the block may be close to it.
    return (limits.typical ? x - limits.centre : x) >= limits.least;
}

// Calls body(begin, length) for the runs of blocks of a piece that reach the limits.
template <class Body>
void RowWeights::for_runs(int64_t begin, int64_t length, const KeyLimits& limits, const Body& body) const {
    const int64_t end = begin + length;
    while (begin < end) {
        const bool reached = reaches(begin, limits);
        int64_t to = begin + kPeakBlock;
        while (to < end && reaches(to, limits) == reached) to += kPeakBlock;
        if (reached) body(begin, std::min(to, end) - begin);
        begin = to;
    }
}

// Sums the kept weight of each piece: that above the limits, and the kept elements of the list between them.
void RowWeights::add_kept(const KeyedList& near, const Split& split) {
    sums_ = split.sums;
    total_ = 0.0;
    int64_t begin = 0;
    for (size_t piece = 0; piece < sums_.size(); ++piece) {
        const int64_t end = split.ends[piece];
        const KeyedList part = {near.key + begin, near.weight + begin, nullptr, end - begin};
        double sum = part.weight_from(cut_.least);
        if (end > cut_.last && sum > part.weight_from(after(cut_.least))) {  // equal elements may be dropped
            for (int64_t i = begin; i < end; ++i) {
                if (near.key[i] == cut_.least && i > cut_.last) sum -= near.weight[i];
            }
        }
        total_ += sums_[piece] += std::max(sum, 0.0);
        begin = end;
    }
}

void RowWeights::copy_kept(std::vector<float>* elements, std::vector<int32_t>* indices) const {
    indices->resize(size_t(n_ + 16));
    int64_t count = 0;
    const auto copy = [&](int64_t begin, int64_t end, float least) {
        count +=
            kernels().find_between(x_ + begin, end - begin, least, kInfinity, int32_t(begin), indices->data() + count);
    };
    const float beyond = after(cut_.least);  // for indices after cut_.last: drop elements equal to cut_.least
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
        float weight, key;
        kernels().weigh(x_ + i, 1, survey_.max, scale_, &weight);
        write_keys(x_ + i, 1, &key);
        if (weight > 0.0f && cut_.keeps(key, int32_t(i))) last = i;
    }
    return last;
}

// The element at which the sum exceeds `wanted`; -1 if there is none. `last` becomes the last kept element that was
// visited.
int64_t RowWeights::draw_from_piece(int64_t begin, double wanted, double* sum, int64_t* last) const {
    float weights[kPeakBlock], keys[kPeakBlock];
    for (const int64_t end = std::min(n_, begin + kSumBlock); begin < end; begin += kPeakBlock) {
        const int64_t length = std::min(kPeakBlock, end - begin);
        kernels().weigh(x_ + begin, length, survey_.max, scale_, weights);
        write_keys(x_ + begin, length, keys);
        const bool is_beyond = begin > cut_.last;  // elements equal to cut_.least are dropped here
        if (is_beyond || begin + length - 1 <= cut_.last) {
            const float least = is_beyond ? after(cut_.least) : cut_.least;
            const double kept = kernels().sum_from(keys, weights, length, least);
            if (*sum + kept <= wanted) {
                *sum += kept;
                continue;
            }
        }
        for (int64_t i = 0; i < length; ++i) {
            if (weights[i] <= 0.0f || !cut_.keeps(keys[i], int32_t(begin + i))) continue;
            *last = begin + i;
            if ((*sum += weights[i]) > wanted) return begin + i;
        }
    }
    return -1;
}

}  // namespace pace
