// A few thousand elements of a row that stand for all of it, to say about where a cut lies.
#pragma once

#include "row_weights.h"

namespace pace {

// The largest elements of the row, as far as they are few, and a sample of the others: pieces at fixed places, so that
// what is found depends on the row alone. In the logits of a trained model the largest have most of the weight, and no
// sample would meet them.
//
// Lies in the thread's scratch: to be asked before anything else is put there.
class RowSketch {
  public:
    RowSketch(const float* x, int64_t n, float scale, const Survey& survey);

    // Limits that likely enclose the cut at a share of the weight, by falling keys: -|t - level| where typical, else t.
    // `level`: null where it is not known; the limits are then by that of the sample, and wider. `caution`: standard
    // errors that the sample is trusted to.
    KeyLimits limits(bool typical, const float* level, double share, double caution) const;

  private:
    float find_level(double* error) const;

    const Survey& survey_;
    const int64_t n_;
    int64_t size_;
    float *t_, *weight_, *key_;  // [size], in the thread's scratch
    float* variance_;            // [size]: of a weight its square, and none where it is known
};

}  // namespace pace
