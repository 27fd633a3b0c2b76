// Cuts of lists of elements, by falling keys, at a given share of the weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "candidates.h"
#include "pace/kernels.h"

namespace pace {

// Keeps keys larger than `least`, and keys equal to it up to the index `last`.
struct Cut {
    float least;
    int32_t last;

    bool keeps(float key, int32_t index) const { return key > least || (key == least && index <= last); }
};

constexpr int32_t kLastIndex = std::numeric_limits<int32_t>::max();

// Elements by rising index. It does not own the arrays. Weights must not be negative.
struct KeyedList {
    const float *key, *weight;
    const int32_t* index;  // null if they are numbered from 0
    int64_t count;

    // The total weight of elements with key >= least.
    double weight_from(float least) const {
        double sum = 0.0;
        for (int64_t begin = 0; begin < count; begin += kSumBlock) {
            sum += kernels().sum_from(key + begin, weight + begin, std::min(kSumBlock, count - begin), least);
        }
        return sum;
    }
};

// Bounds of the key at which the weight reaches `mass`. Elements with keys from `high` on have less, namely `above`.
struct Bracket {
    float low, high;
    double above;

    // Halves the range at most `steps` times; stops at neighbouring floats.
    void narrow(const KeyedList& list, double mass, int steps) {
        for (int step = 0; step < steps; ++step) {
            const float middle = low + (high - low) / 2;
            if (!(middle > low && middle < high)) return;
            const double weight = list.weight_from(middle);
            if (weight >= mass) {
                low = middle;
            } else {
                high = middle;
                above = weight;
            }
        }
    }
};

// The elements of a list with low <= key < high, by rising index.
class SubList {
  public:
    SubList(const KeyedList& list, float low, float high) {
        std::vector<int32_t> places(size_t(std::min(kSumBlock, list.count)) + 16);
        for (int64_t begin = 0; begin < list.count; begin += kSumBlock) {
            const int found = kernels().find_between(list.key + begin, std::min(kSumBlock, list.count - begin), low,
                                                     high, int32_t(begin), places.data());
            for (int i = 0; i < found; ++i) {
                keys_.push_back(list.key[places[i]]);
                weights_.push_back(list.weight[places[i]]);
                indices_.push_back(list.index ? list.index[places[i]] : places[i]);
            }
        }
    }
    KeyedList list() const { return {keys_.data(), weights_.data(), indices_.data(), int64_t(keys_.size())}; }

  private:
    std::vector<float> keys_, weights_;
    std::vector<int32_t> indices_;
};

// Finds the cut, in order of falling key and then rising index. An element is kept if less than `mass` comes before it;
// the first always is. All keys must be in [low, high). Sums of the list at a few keys locate the cut; only the last
// few elements are sorted.
inline Cut find_cut(const KeyedList& list, double mass, float low, float high) {
    constexpr int64_t kSorted = 64;
    mass = std::max(mass, 1e-300);
    double above = 0.0;
    const auto narrow = [&](const KeyedList& part) {
        Bracket bracket = {low, high, 0.0};
        bracket.narrow(part, mass - above, 4);
        above += bracket.above;
        low = bracket.low, high = bracket.high;
    };
    narrow(list);
    SubList part(list, low, high);
    for (float middle; part.list().count > kSorted; part = SubList(part.list(), low, high)) {
        middle = low + (high - low) / 2;
        if (!(middle > low && middle < high)) break;
        narrow(part.list());
    }
    Candidates few;
    const KeyedList last_part = part.list();
    for (int64_t i = 0; i < last_part.count; ++i) {
        few.push_back({last_part.key[i], last_part.index[i], last_part.weight[i]});
    }
    if (few.empty()) return {low, kLastIndex};  // all weights together are less than mass, by rounding: keep all
    if (!std::is_sorted(few.begin(), few.end(), goes_before)) std::sort(few.begin(), few.end(), goes_before);
    size_t last = 0;
    for (; last < few.size(); ++last) {
        if ((above += few[last].weight) >= mass) break;
    }
    last = std::min(last, few.size() - 1);
    return {few[last].value, few[last].index};
}

}  // namespace pace
