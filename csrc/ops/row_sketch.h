// A few thousand elements that represent a whole row, to estimate where a cut is.
#pragma once

#include "cuts.h"
#include "row_survey.h"

namespace pace {

constexpr double kCaution = 2.5;  // standard errors on each side of an estimate

// A sample, which consists of pieces at fixed places, so that the result depends only on the row. In the logits of a
// trained model the largest elements have most of the weight, and a sample misses them. So if its weight is not that
// of the row, the sketch also has the largest elements.
//
// The data lies in the thread's scratch and is valid until the scratch is used again.
class RowSketch {
  public:
    RowSketch(const float* x, int64_t n, float scale);                        // before the survey
    RowSketch(const float* x, int64_t n, float scale, const Survey& survey);  // uses its total and level

    // Limits that are likely to enclose the cut at a share of the weight, by falling keys. `caution`: number of standard
    // errors on each side.
    KeyLimits limits(bool typical, double share, double caution);

    // True if the weight of the sample is close to that of any other sample.
    bool is_precise() const;

    // True if only a few elements are between the limits.
    bool is_narrow(const KeyLimits& limits) const;

  private:
    RowSketch(int64_t n, float scale, const Survey* survey);
    void take_sample(const float* x);
    void weigh(int64_t num_sampled, int64_t num_largest);
    KeyedList list(const float* weight) const { return {key_, weight, nullptr, size_}; }

    const Survey* const survey_;  // null if unknown
    const int64_t n_;
    const float scale_;
    float shift_;
    int64_t size_;
    float *x_, *t_, *weight_;  // [size], in the thread's scratch: the sample, then the largest
    float* key_;               // [size]: t, or -|t - level| if typical
    float* variance_;          // [size]: square of the weight for sampled elements, 0 for known ones
};

}  // namespace pace
