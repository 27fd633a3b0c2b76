// Where lists of elements are cut, by falling keys, until they have some part of the weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "candidates.h"
#include "pace/kernels.h"

namespace pace {

// Kept are larger keys than `least`, and that key up to the index `last`.
struct Cut {
    float least;
    int32_t last;

    bool keeps(float key, int32_t index) const { return key > least || (key == least && index <= last); }
};

constexpr int32_t kLastIndex = std::numeric_limits<int32_t>::max();

// Elements by rising index; the arrays belong to somebody else. Weights of a list are not negative.
struct KeyedList {
    const float *key, *weight;
    const int32_t* index;  // null where nobody asks for it
    int64_t count;

    // The weight of those with key >= least.
    double weight_from(float least) const {
        double sum = 0.0;
        for (int64_t begin = 0; begin < count; begin += kSumBlock) {
            sum += kernels().sum_from(key + begin, weight + begin, std::min(kSumBlock, count - begin), least);
        }
        return sum;
    }
};

// Keys between which the elements get `mass`: those from `high` on, of the weight `above`, have less.
struct Bracket {
    float low, high;
    double above;

    // Halves the range some times; stops at neighbouring floats.
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

// The cut behind those elements, by falling key and then by rising index, before which less than `mass` lies; it keeps
// the first of them in any case. All keys are in [low, high). `scratch` has places for a vector more than the list has.
// Sums of the list at a few keys say where the cut is; only the last few elements are sorted.
inline Cut find_cut(const KeyedList& list, double mass, float low, float high, int32_t* scratch) {
    constexpr int kSorted = 64;
    mass = std::max(mass, 1e-300);
    Bracket bracket = {low, high, 0.0};
    Candidates few;
    for (;;) {
        bracket.narrow(list, mass, 8);
        const KeyLimits limits = {false, 0.0f, bracket.high, bracket.low};
        int found = 0;
        for (int64_t begin = 0; begin < list.count; begin += kSumBlock) {
            found += kernels()
                         .split_weights(list.key + begin, std::min(kSumBlock, list.count - begin), 0.0f, 1.0f, limits,
                                        int32_t(begin), scratch + found)
                         .found;
        }
        const float middle = bracket.low + (bracket.high - bracket.low) / 2;
        if (found > kSorted && middle > bracket.low && middle < bracket.high) continue;
        for (int i = 0; i < found; ++i) {
            const int32_t place = scratch[i];
            few.push_back({list.key[place], list.index[place], list.weight[place]});
        }
        break;
    }
    if (few.empty()) return {low, kLastIndex};  // rounding leaves less than the mass: all of them
    if (!std::is_sorted(few.begin(), few.end(), goes_before)) std::sort(few.begin(), few.end(), goes_before);
    double before = bracket.above;
    size_t last = 0;
    for (; last < few.size(); ++last) {
        if ((before += few[last].weight) >= mass) break;
    }
    last = std::min(last, few.size() - 1);
    return {few[last].value, few[last].index};
}

}  // namespace pace
