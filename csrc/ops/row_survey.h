// The first pass over a row of logits, which later steps of a draw build on.
#pragma once

#include <algorithm>
#include <vector>

#include "candidates.h"
#include "pace/kernels.h"

namespace pace {

// The elements of a row by their keys: above some limits, between them, or below.
struct Split {
    KeyLimits limits;
    std::vector<double> sums;   // for each piece, the weight of the elements above the limits
    std::vector<int64_t> ends;  // for each piece, its end in the list of the elements between them; empty: no split

    // That list, in order; it belongs to the thread, and is valid until another split of a row of n.
    static float* list(int64_t n);
};

// Weights are 2^t with t = (x - max) * scale.
struct Survey {
    std::vector<float> maxima;  // for blocks of kPeakBlock
    float max;                  // of the row; NaN if the row contains NaN
    // If weights are requested:
    double total = 0.0;        // sum of the weights
    std::vector<double> sums;  // sums of the pieces
    float level = 0.0f;        // weighted mean of t, if a share by typical keys is requested
    Split split;               // at limits that are likely to enclose the cut; empty if a sample is too imprecise
};

// What a survey finds in addition to the maxima.
struct SurveyRequest {
    float scale = 0.0f;  // log2(e) / temperature; 0 for no weights
    double share = 1.0;  // of the weight that will be kept
    bool typical = false;

    bool operator==(const SurveyRequest&) const = default;
};

// log2(e) / temperature, clamped to finite floats.
float weight_scale(float temperature);

Survey survey(const float* x, int64_t n, const SurveyRequest& request);

// Calls body(begin, length) for the pieces of a row, of kSumBlock elements each.
template <class Body>
void for_pieces(int64_t n, const Body& body) {
    for (int64_t begin = 0; begin < n; begin += kSumBlock) body(begin, std::min(kSumBlock, n - begin));
}

// Up to this length all elements of a row are listed: a sample would be half of the row.
constexpr int64_t kShortRow = 8192;

}  // namespace pace
