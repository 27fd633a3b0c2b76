// The weights of a whole row of logits, 2^((x - max) * scale), for draws from more tokens than a few.
//
// Nothing as long as the row is written: weights are summed in pieces of kSumBlock elements, and a draw makes those of
// one piece again. A cut (the nucleus, the typical tokens) takes one such pass too: a sample of the row says between
// which keys it lies, the pass sums what is above them and lists what is between, and the cut is found in the list.
// That the sample was right is seen afterwards; where it was not, the next pass trusts it less. Blocks whose maxima are
// below the limits are only summed, or where the sum is known, passed over.
#pragma once

#include <vector>

#include "candidates.h"
#include "cuts.h"

namespace pace {

// What the first pass over a row leaves.
struct Survey {
    std::vector<float> maxima;  // of blocks of kPeakBlock
    float max;                  // of all; NaN where there is one in the row
    double total = 0.0;         // of the weights by some scale, where asked for
    std::vector<double> sums;   // those of pieces
};

// log2(e) / temperature, kept within floats.
float weight_scale(float temperature);

// scale 0: without weights.
Survey survey(const float* x, int64_t n, float scale);

class RowWeights {
  public:
    // A row whose largest element is finite; the survey's sums are by `scale`, or missing.
    RowWeights(const float* x, int64_t n, float scale, const Survey& survey);

    // The last one called says what is kept of the row.
    void keep_all();
    void keep_likely(float min_p);  // weights of at least min_p
    void keep_nucleus(double top_p);
    void keep_typical(double mass);

    bool keeps_unlikely(float min_p) const { return cut_.least < least_likely(min_p); }
    // The kept elements, where x has no typical tokens to keep, and their indices.
    void copy_kept(std::vector<float>* elements, std::vector<int32_t>* indices) const;
    int64_t draw(double uniform) const;

  private:
    // What a pass found between its limits.
    struct Near {
        int32_t* found;             // in the thread's scratch
        float *keys, *weights;      // there too, for as many
        std::vector<int64_t> ends;  // of the pieces, in the list
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
    double all_ = 0.0;    // the weight of the row, and
    float level_ = 0.0f;  // the mean of t by weight: both once a pass for a cut was made
    bool typical_ = false;
    Cut cut_ = {kLowest, kLastIndex};  // of keys
    double total_ = 0.0;
    std::vector<double> sums_;  // of pieces: what is kept
};

}  // namespace pace
