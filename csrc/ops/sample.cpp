// Draws tokens from rows of logits, and computes log-probabilities of the drawn tokens. A chunk is one row.
//
// Each rule applies to the elements that the previous rule kept. One pass over the row finds the maxima of its blocks.
// With top_k they locate the few candidates, and all other rules work on those. Without top_k, that pass also sums the
// weights, and row_weights.h draws from the whole row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "candidates.h"
#include "cuts.h"
#include "pace/row_ops.h"
#include "row_weights.h"

namespace pace {

// The rules of one draw, as `RULES_DTYPE` in pace/ops/draws.py.
struct SampleRules {
    float temperature;  // 1 is off; 0 takes the largest, as ArgmaxOp
    int64_t top_k;      // 0 is off
    float top_p;        // 1 is off
    float min_p;        // 0 is off
    float typical_p;    // 1 is off
};

int64_t SampleOp::rules_bytes() { return sizeof(SampleRules); }

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Inspecting this many elements takes about as long as correcting the maxima after one edit. See benchmarks/RESULTS.md,
// "Choosing tokens".
constexpr int64_t kPerEdit = 256;

// ---- Few candidates

// Keeps the elements whose information is closest to the entropy, up to `mass` of the weight, and all that are as close
// as the last.
void keep_typical(Candidates& candidates, double mass) {
    double total = 0.0, surplus = 0.0;
    for (const Candidate& c : candidates) {
        total += c.weight;
        surplus += c.weight * c.value;
    }
    const float level = float(surplus / total);
    const int64_t count = int64_t(candidates.size());
    std::vector<float> keys, weights;
    std::vector<int32_t> indices;
    for (const Candidate& c : candidates) {
        keys.push_back(-std::fabs(c.value - level));
        weights.push_back(float(c.weight));
        indices.push_back(c.index);
    }
    const auto [low, high] = std::minmax_element(keys.begin(), keys.end());
    const KeyedList list = {keys.data(), weights.data(), indices.data(), count};
    const Cut cut = find_cut(list, mass * total, *low, std::nextafter(*high, kInfinity));
    size_t kept = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
        if (keys[i] >= cut.least) candidates[kept++] = candidates[i];
    }
    candidates.resize(kept);
}

// Applies min_p and typical_p and draws from candidates, which are in order of rising index. The weight of the largest
// is 1, and values are logarithms of the weights, to some base.
int64_t draw(Candidates candidates, const SampleRules& rules, double uniform) {
    if (rules.min_p > 0.0f) {
        const double least = std::min(1.0, double(rules.min_p));
        const auto is_unlikely = [&](const Candidate& c) { return c.weight < least; };
        candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_unlikely), candidates.end());
    }
    if (rules.typical_p < 1.0f) keep_typical(candidates, rules.typical_p);
    double total = 0.0, sum = 0.0;
    for (const Candidate& c : candidates) total += c.weight;
    int64_t last = -1;
    for (const Candidate& c : candidates) {
        if (c.weight <= 0) continue;
        last = c.index;
        if ((sum += c.weight) > uniform * total) break;
    }
    return last;
}

int64_t draw_from_top(const float* x, int64_t n, const Survey& survey, const SampleRules& rules, double uniform) {
    Candidates candidates = TopK(x, n, rules.top_k, kLowest, rules.temperature).find(survey.maxima);
    const float shift = survey.max / rules.temperature;
    double total = 0.0;
    for (Candidate& c : candidates) {
        c.value /= rules.temperature;
        total += c.weight = weight_of(c.value, shift);
    }
    if (rules.top_p < 1.0f) cut_to_nucleus(candidates, double(rules.top_p) * total);
    for (Candidate& c : candidates) c.value -= shift;
    std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.index < b.index; });
    return draw(std::move(candidates), rules, uniform);
}

// ---- A whole row

int64_t draw_from_all(const float* x, int64_t n, float scale, const Survey& survey, const SampleRules& rules,
                      double uniform) {
    RowWeights weights(x, n, scale, survey);
    const bool has_nucleus = rules.top_p < 1.0f, has_least = rules.min_p > 0.0f, is_typical = rules.typical_p < 1.0f;
    if (has_nucleus) {
        weights.keep_nucleus(rules.top_p);
        if (has_least && weights.keeps_unlikely(rules.min_p)) weights.keep_likely(rules.min_p);
    } else if (has_least) {
        weights.keep_likely(rules.min_p);
    } else if (is_typical) {
        weights.keep_typical(rules.typical_p);
    } else {
        weights.keep_all();
    }
    if (!is_typical || !(has_nucleus || has_least)) return weights.draw(uniform);
    thread_local std::vector<float> elements;
    thread_local std::vector<int32_t> indices;
    weights.copy_kept(&elements, &indices);
    const int64_t count = int64_t(elements.size());
    const Survey all = pace::survey(elements.data(), count, {scale, rules.typical_p, true});
    RowWeights kept(elements.data(), count, scale, all);
    kept.keep_typical(rules.typical_p);
    return indices[size_t(kept.draw(uniform))];
}

int64_t first_largest(const float* x, int64_t n, const Survey& survey) {
    const auto block = std::find(survey.maxima.begin(), survey.maxima.end(), survey.max) - survey.maxima.begin();
    return std::find(x + block * kPeakBlock, x + n, survey.max) - x;
}

float logprob(float value, const Survey& given) { return (value - given.max) - float(std::log(given.total)); }

// What the first pass over a row finds for its rules.
SurveyRequest request_of(const SampleRules& rules) {
    const float scale = weight_scale(rules.temperature);
    if (rules.temperature <= 0 || rules.top_k > 0) return {};
    if (rules.top_p < 1) return {scale, rules.top_p};
    if (rules.min_p > 0) return {};
    return {scale, rules.typical_p, rules.typical_p < 1};
}

}  // namespace

// A row with its edits applied; the destructor restores it.
class SampleOp::Edited {
  public:
    Edited(const SampleOp& op, float* x, int64_t chunk) : x_(x) {
        if (op.edit_ends == nullptr) return;
        for (int64_t list = chunk ? op.edit_ends[chunk - 1] : 0; list < op.edit_ends[chunk]; ++list) {
            const LogitEdit* const edits = reinterpret_cast<const LogitEdit*>(op.edit_lists[2 * list]);
            for (int64_t i = 0; i < op.edit_lists[2 * list + 1]; ++i) {
                const auto [token, factor, addend] = edits[i];
                if (token < 0 || token >= op.n) continue;
                originals_.push_back({x[token], token, 0.0});
                x[token] = (x[token] < 0.0f ? x[token] * factor : x[token] / factor) + addend;
            }
        }
    }
    ~Edited() {
        for (size_t i = originals_.size(); i-- > 0;) x_[originals_[i].index] = originals_[i].value;
    }
    Edited(const Edited&) = delete;
    Edited& operator=(const Edited&) = delete;

    int64_t count() const { return int64_t(originals_.size()); }

    float original(int64_t token) const {
        for (const Candidate& c : originals_) {
            if (c.index == token) return c.value;
        }
        return x_[token];
    }

    // Updates maxima of the unedited row for the edits.
    void correct(Survey* survey, int64_t n) const {
        std::vector<float>& maxima = survey->maxima;
        bool is_number = !std::isnan(survey->max);
        for (const Candidate& c : originals_) {
            const float x = x_[c.index];
            float& largest = maxima[size_t(c.index / kPeakBlock)];
            is_number &= !std::isnan(x);
            if (x >= largest) {
                largest = x;
            } else if (c.value >= largest) {  // it may have been the largest: search the block again
                largest = kInfinity;
            }
        }
        for (size_t block = 0; block < maxima.size(); ++block) {
            if (maxima[block] < kInfinity) continue;
            const float* const begin = x_ + int64_t(block) * kPeakBlock;
            maxima[block] = *std::max_element(begin, std::min(begin + kPeakBlock, static_cast<const float*>(x_ + n)));
        }
        survey->max =
            is_number ? *std::max_element(maxima.begin(), maxima.end()) : std::numeric_limits<float>::quiet_NaN();
    }

  private:
    float* const x_;
    Candidates originals_;  // original value and index, in the order of the edits
};

void SampleOp::run(int, int64_t chunk, int) const {
    float* x = logits + rows[chunk] * row_stride;
    if (mask_rows != nullptr && mask_rows[chunk] >= 0) {
        // Masks a copy, which stays in the cache. The row itself came from memory and would be written back there.
        thread_local std::vector<float> masked;
        masked.resize(size_t(n));
        kernels().apply_mask(x, masks + mask_rows[chunk] * masks_stride, n, masked.data());
        x = masked.data();
    }
    tokens[chunk] = draw(chunk, x);
}

// Returns the drawn token, or -1 if there is none. Also writes log-probabilities.
int64_t SampleOp::draw(int64_t chunk, float* x) const {
    SampleRules own = rules[chunk];
    if (own.top_k < 0 || own.top_k >= n) own.top_k = 0;
    const SurveyRequest request = request_of(own);
    const bool wants_logprobs = num_top != nullptr && num_top[chunk] >= 0;
    const float scale = wants_logprobs ? weight_scale(1.0f) : 0.0f;
    const SurveyRequest of_given = request.scale == scale ? request : SurveyRequest{scale};

    Survey given;
    if (wants_logprobs || request.scale == 0.0f) {
        given = survey(x, n, of_given);
        if (wants_logprobs) write_likeliest(chunk, x, given);
    }
    const Edited edited(*this, x, chunk);
    Survey found;
    if (request.scale != 0.0f && (edited.count() > 0 || request != of_given)) {
        found = survey(x, n, request);
    } else if (edited.count() > n / kPerEdit) {
        found = survey(x, n, {});
    } else {
        found = given;
        if (edited.count() > 0) edited.correct(&found, n);
    }
    int64_t token = -1;
    if (!std::isfinite(found.max)) return token;
    if (own.temperature == 0.0f) {
        token = first_largest(x, n, found);
    } else if (own.top_k > 0) {
        token = draw_from_top(x, n, found, own, uniform[chunk]);
    } else {
        token = draw_from_all(x, n, weight_scale(own.temperature), found, own, uniform[chunk]);
    }
    if (wants_logprobs && token >= 0) logprobs[chunk] = logprob(edited.original(token), given);
    return token;
}

// Writes the `num_top` likeliest tokens of a row, and fills the remaining places.
void SampleOp::write_likeliest(int64_t chunk, const float* x, const Survey& given) const {
    Candidates likeliest;
    const int64_t wanted = std::min(num_top[chunk], n);
    if (wanted > 0) likeliest = TopK(x, n, wanted, kMinusInfinity, 1.0f).find(given.maxima);
    std::sort(likeliest.begin(), likeliest.end(), goes_before);
    logprobs[chunk] = -kInfinity;
    for (int64_t i = 0; i < max_top; ++i) {
        const bool is_there = i < wanted && i < int64_t(likeliest.size());
        top_tokens[chunk * max_top + i] = is_there ? likeliest[i].index : -1;
        top_logprobs[chunk * max_top + i] = is_there ? logprob(likeliest[i].value, given) : -kInfinity;
    }
}

void LogprobsOp::run(int, int64_t chunk, int) const {
    const float* const x = logits + rows[chunk] * row_stride;
    const Survey given = survey(x, n, {weight_scale(1.0f)});
    logprobs[chunk] = logprob(x[tokens[chunk]], given);
    Candidates candidates;
    if (top > 0) {
        candidates = TopK(x, n, std::min(top, n), kMinusInfinity, 1.0f).find(given.maxima);
        std::sort(candidates.begin(), candidates.end(), goes_before);
    }
    for (int64_t i = 0; i < top; ++i) {
        const bool is_there = i < int64_t(candidates.size());
        top_tokens[chunk * top + i] = is_there ? candidates[i].index : -1;
        top_logprobs[chunk * top + i] = is_there ? logprob(candidates[i].value, given) : -kInfinity;
    }
}

}  // namespace pace
