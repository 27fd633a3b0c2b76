// Candidates among the tokens of a row, found by inspecting few elements.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "pace/kernels.h"

namespace pace {

struct Candidate {
    float value;
    int32_t index;
    double weight;  // exp(value - max of the row), if needed; the probability is weight / sum of weights
};

// Order of preference for tokens: larger values first; among equals the lower index first.
inline bool goes_before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}

using Candidates = std::vector<Candidate>;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();  // below everything but -infinity

// Collects all elements of a row that are at least its k-th largest element (1 <= k), unordered, and none below
// `floor`. With a temperature, elements that equal the k-th largest after the division count as equal to it.
class TopK {
  public:
    TopK(const float* x, int64_t n, int64_t k, float floor, float temperature)
        : x_(x), n_(n), k_(k), temperature_(temperature), threshold_(floor) {}

    // Uses the maxima of the row's blocks of kPeakBlock. The k-th largest maximum is a lower bound for the k-th largest
    // element. Only blocks whose maximum reaches it are read.
    Candidates find(const std::vector<float>& maxima) {
        if (k_ <= int64_t(maxima.size())) {
            std::vector<float> order = maxima;
            std::nth_element(order.begin(), order.begin() + (k_ - 1), order.end(), std::greater<float>());
            threshold_ = std::max(threshold_, margin_below(order[k_ - 1]));
        }
        for (size_t block = 0; block < maxima.size(); ++block) {
            if (maxima[block] >= threshold_) search(int64_t(block) * kPeakBlock, int64_t(block + 1) * kPeakBlock);
        }
        thin_out();
        return std::move(candidates_);
    }

  private:
    static constexpr int kFoundAtOnce = 1024;

    void search(int64_t begin, int64_t end) {
        const int64_t length = std::min(end, n_) - begin;
        int32_t found[kFoundAtOnce];
        for (int64_t position = 0; position < length;) {
            const int count = kernels().find_at_least(x_ + begin, length, threshold_, &position, found, kFoundAtOnce);
            for (int i = 0; i < count; ++i) {
                const int32_t index = int32_t(begin) + found[i];
                candidates_.push_back({x_[index], index, 0.0});
            }
            if (int64_t(candidates_.size()) >= limit_) {
                thin_out();
                limit_ = std::max(limit_, int64_t(2 * candidates_.size()));
            }
        }
    }

    void thin_out() {
        if (int64_t(candidates_.size()) <= k_) return;
        std::nth_element(candidates_.begin(), candidates_.begin() + (k_ - 1), candidates_.end(), goes_before);
        const float least = candidates_[k_ - 1].value, divided = least / temperature_;
        threshold_ = margin_below(least);
        const auto below = [&](const Candidate& c) { return c.value / temperature_ < divided; };
        candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), below), candidates_.end());
    }

    // A bound below all values that may round to the same quotient.
    float margin_below(float least) const {
        return temperature_ == 1.0f ? least : least - (4e-7f * std::fabs(least) + 4e-45f * temperature_);
    }

    const float* x_;
    int64_t n_, k_;
    float temperature_, threshold_;
    int64_t limit_ = std::max<int64_t>(2 * k_, kFoundAtOnce);
    Candidates candidates_;
};

inline double weight_of(float value, float max) { return std::exp(double(value - max)); }

// Cuts `candidates` down to the nucleus. In the order of goes_before, an element is kept if less than `mass` of weight
// comes before it; the first always is. Halves the range that contains the last one: O(n) in all, no full sort.
inline void cut_to_nucleus(Candidates& candidates, double mass) {
    auto low = candidates.begin(), high = candidates.end();  // elements before low are kept, from high on dropped
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

}  // namespace pace
