// A few thousand elements that represent a whole row, to estimate the place of a cut.
#pragma once

#include "row_weights.h"

namespace pace {

// The largest elements of the row, if they are few, and a sample of the others. The sample consists of pieces at fixed
// places, so the result depends only on the row. In the logits of a trained model the largest elements have most of the
// weight, and a sample alone would miss them.
//
// The data lies in the thread's scratch and is valid until the scratch is used again.
class RowSketch {
  public:
    RowSketch(const float* x, int64_t n, float scale, const Survey& survey);

    // Limits that are likely to enclose the cut at a share of the weight, by falling keys. The key is -|t - level| if
    // `typical`, else t. If `level` is null, the sample's level is used, with wider limits. `caution`: number of
    // standard errors on each side.
    KeyLimits limits(bool typical, const float* level, double share, double caution) const;

  private:
    float find_level(double* error) const;

    const Survey& survey_;
    const int64_t n_;
    int64_t size_;
    float *t_, *weight_, *key_;  // [size], in the thread's scratch
    float* variance_;            // [size]: square of the weight for sampled elements, 0 for known ones
};

}  // namespace pace
