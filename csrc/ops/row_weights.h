// The weights of a whole row of logits, 2^((x - max) * scale), for draws from many tokens.
//
// No array of the row's length is stored. The survey sums weights in pieces of kSumBlock elements, and a draw recomputes
// the weights of one piece. A cut (nucleus, typical tokens) needs the weight above it. A sample of the row estimates
// between which keys the cut lies. A pass sums the weights above these limits and marks the elements between them, and
// the cut is found in their list. If a sample suffices, the survey is this pass. Otherwise, or if the cut is not between
// the limits, the total and the maxima of the survey give better limits for a second pass. It skips blocks whose maxima
// are below the limits.
#pragma once

#include <vector>

#include "cuts.h"
#include "row_survey.h"

namespace pace {

class RowWeights {
  public:
    // The row's largest element must be finite. The survey has sums for `scale`, which only keep_likely() can do without.
    RowWeights(const float* x, int64_t n, float scale, const Survey& survey);

    // The last of these calls determines the kept elements. A share must be the one that the survey was requested for.
    void keep_all();
    void keep_likely(float min_p);  // weights of at least min_p
    void keep_nucleus(double top_p);
    void keep_typical(double mass);

    bool keeps_unlikely(float min_p) const { return cut_.least < least_likely(min_p); }
    // The kept elements and their indices. Not for rows with typical tokens kept.
    void copy_kept(std::vector<float>* elements, std::vector<int32_t>* indices) const;
    int64_t draw(double uniform) const;

  private:
    void keep_share(double share);
    bool cut_at(const Split& split, double share);
    Split split_at(const KeyLimits& limits) const;
    bool reaches(int64_t begin, const KeyLimits& limits) const;
    int32_t index_of(int32_t place, const Split& split) const;
    template <class Body>
    void for_runs(int64_t begin, int64_t length, const KeyLimits& limits, const Body& body) const;
    void write_keys(const float* x, int64_t count, float* keys) const;
    float least_likely(float min_p) const;
    int64_t draw_from_piece(int64_t begin, double wanted, double* sum, int64_t* last) const;
    void add_kept(const KeyedList& near, const Split& split);

    const float* const x_;
    const int64_t n_;
    const float scale_;
    const Survey& survey_;
    bool typical_ = false;
    Cut cut_ = {kLowest, kLastIndex};  // in terms of keys
    double total_ = 0.0;
    std::vector<double> sums_;  // kept weight of each piece
};

}  // namespace pace
