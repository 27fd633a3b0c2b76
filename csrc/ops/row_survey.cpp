#include "row_survey.h"

#include <cmath>

#include "row_sketch.h"

namespace pace {

namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kHeadroom = 60.0f;  // a piece may have weights up to 2^60; they and their sums are far from overflow

// Limits for the nucleus of an unknown row; false if they are not close to each other.
bool guess_limits(const float* x, int64_t n, const SurveyRequest& request, KeyLimits* limits) {
    if (request.share >= 1.0 || request.typical || n <= kShortRow) return false;
    RowSketch sketch(x, n, request.scale);
    if (!sketch.is_precise()) return false;
    *limits = sketch.limits(false, request.share, kCaution);
    return sketch.is_narrow(*limits);
}

}  // namespace

float* Split::list(int64_t n) {
    thread_local std::vector<float> elements;
    elements.resize(std::max(elements.size(), size_t(n + 16)));
    return elements.data();
}

float weight_scale(float temperature) {
    return std::clamp(kLog2E / temperature, std::numeric_limits<float>::min(), std::numeric_limits<float>::max());
}

// Weights are relative to the largest element of the pieces before, until the row's is known. Only if an element is far
// larger, its piece is surveyed again.
Survey survey(const float* x, int64_t n, const SurveyRequest& request) {
    const KernelTable& table = kernels();
    const float scale = request.scale;
    const bool has_weights = scale != 0.0f;
    Survey result;
    Split& split = result.split;
    result.maxima.resize(size_t((n + kPeakBlock - 1) / kPeakBlock));
    result.max = kMinusInfinity;
    const KeyLimits* const limits = guess_limits(x, n, request, &split.limits) ? &split.limits : nullptr;
    float* const near = limits ? Split::list(n) : nullptr;
    int64_t count = 0;
    std::vector<PieceSums> sums;
    std::vector<float> shifts;
    bool is_number = true;
    for_pieces(n, [&](int64_t begin, int64_t length) {
        float* const maxima = result.maxima.data() + begin / kPeakBlock;
        const auto peak = [&] { return *std::max_element(maxima, maxima + (length + kPeakBlock - 1) / kPeakBlock); };
        float shift = result.max;
        PieceSums own = {};
        const auto sum = [&] {
            own = table.survey_piece(x + begin, length, shift, scale, request.typical, limits, maxima, near + count);
        };
        if (!has_weights || !std::isfinite(shift)) {
            is_number &= table.block_peaks(x + begin, length, maxima);
            shift = peak();
            if (has_weights && std::isfinite(shift)) sum();
        } else {
            sum();
            if ((peak() - shift) * scale > kHeadroom) {
                shift = peak();
                sum();
            }
        }
        is_number &= !std::isnan(own.all);
        result.max = std::max(result.max, peak());
        sums.push_back(own);
        if (limits) split.ends.push_back(count += own.near);
        shifts.push_back(shift);
    });
    if (!is_number) result.max = std::numeric_limits<float>::quiet_NaN();
    if (!has_weights || !std::isfinite(result.max)) return result;
    double surplus = 0.0;
    for (size_t i = 0; i < sums.size(); ++i) {
        // No factor for a piece of -infinity only.
        const double t = sums[i].all > 0.0f ? (double(shifts[i]) - result.max) * scale : 0.0, factor = std::exp2(t);
        result.sums.push_back(sums[i].all * factor);
        if (limits) split.sums.push_back(sums[i].sure * factor);
        result.total += result.sums.back();
        surplus += sums[i].surplus * factor + t * result.sums.back();
    }
    if (request.typical) result.level = float(surplus / result.total);
    return result;
}

}  // namespace pace
