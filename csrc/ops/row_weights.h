// The weights of a whole row of logits, 2^((x - max) * scale), for draws from many tokens.
//
// No array of the row's length is stored. Weights are summed in pieces of kSumBlock elements, and a draw recomputes the
// weights of one piece. A cut (nucleus, typical tokens) takes one such pass too. A sample of the row estimates between
// which keys the cut lies. The pass sums the weights above them and lists the elements between them, and the cut is
// found in the list. If the estimate turns out wrong, the next pass uses wider limits. Blocks whose maxima are below
// the limits are only summed, or skipped if the sum is known.
#pragma once

#include <vector>

#include "candidates.h"
#include "cuts.h"

namespace pace {

// Results of the first pass over a row.
struct Survey {
    std::vector<float> maxima;  // for blocks of kPeakBlock
    float max;                  // of the row; NaN if the row contains NaN
    double total = 0.0;         // sum of the weights for some scale, if requested
    std::vector<double> sums;   // sums of the pieces
};

// log2(e) / temperature, clamped to finite floats.
float weight_scale(float temperature);

// Surveys a row; scale 0 skips the weights.
Survey survey(const float* x, int64_t n, float scale);

class RowWeights {
  public:
    // The row's largest element must be finite. The survey's sums are for `scale`, or missing.
    RowWeights(const float* x, int64_t n, float scale, const Survey& survey);

    // The last of these calls determines the kept elements.
    void keep_all();
    void keep_likely(float min_p);  // weights of at least min_p
    void keep_nucleus(double top_p);
    void keep_typical(double mass);

    bool keeps_unlikely(float min_p) const { return cut_.least < least_likely(min_p); }
    // The kept elements and their indices. Not for rows with typical tokens kept.
    void copy_kept(std::vector<float>* elements, std::vector<int32_t>* indices) const;
    int64_t draw(double uniform) const;

  private:
    // Results of a pass between its limits.
    struct Near {
        int32_t* found;             // in the thread's scratch
        float *keys, *weights;      // in the same scratch, with the same length
        std::vector<int64_t> ends;  // end of each piece in the list
        double sure = 0.0;          // the weight above the limits
    };

    void keep_share(double share);
    bool cut_between(const KeyLimits& limits, double share);
    void split(const KeyLimits& limits, Near* near);
    bool reaches(int64_t begin, const KeyLimits& limits) const;
    template <class Body>
    void for_runs(int64_t begin, int64_t length, const KeyLimits& limits, const Body& body) const;
    float key_of(float x) const;
    float least_likely(float min_p) const;
    int64_t draw_from_piece(int64_t begin, double wanted, double* sum, int64_t* last) const;
    KeyedList list(const Near& near) const;
    void add_kept(const KeyedList& near, const std::vector<int64_t>& ends);

    const float* const x_;
    const int64_t n_;
    const float scale_;
    const Survey& survey_;
    double all_ = 0.0;    // total weight of the row; the first pass for a cut sets it and level_
    float level_ = 0.0f;  // weighted mean of t
    bool typical_ = false;
    Cut cut_ = {kLowest, kLastIndex};  // in terms of keys
    double total_ = 0.0;
    std::vector<double> sums_;  // kept weight of each piece
};

}  // namespace pace
