// Ops whose rows are independent: norms, rotary embedding, and sampling. For the use of an op see pace/ops.h.
#pragma once

#include "pace/kernels.h"

namespace pace {

// Heads [tokens][heads][head_dim] in memory. The elements of a head are contiguous; strides are in floats.
struct HeadsView {
    float* data;
    int64_t token_stride, head_stride;
    float* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// A norm over rows, and its parameters; see kernels/norm.inl.
struct Norm {
    enum class Kind : int { None, Rms, Layer } kind;
    const float* weight;  // [k]; may be null for Layer
    const float* bias;    // [k], Layer only; or null
    float eps;
    int64_t head_stride = 0;  // for norms of heads: floats between the weights of neighbouring heads; 0: shared

    explicit operator bool() const { return kind != Kind::None; }
};

// csrc/ops/norm.cpp. y = norm(x), or factor * (residual + norm(x)).
struct NormOp {
    static constexpr int kPhases = 1;
    Norm norm;
    const float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride;
    int64_t rows, k;
    float* y;               // [rows][k]; not x, nor the residual
    const float* residual;  // [rows][k], residual_stride floats between rows; or null
    int64_t residual_stride;
    float factor;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// csrc/ops/norm.cpp. x [k] = norm(x), with the weights of head `head`.
void norm_head(const Norm& norm, int64_t head, float* x, int64_t k);

// csrc/ops/norm.cpp. Normalises every head of x [tokens][heads][head_dim] in place.
struct HeadNormOp {
    static constexpr int kPhases = 1;
    HeadsView x;
    int64_t tokens, heads, head_dim;
    Norm norm;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, tokens_per_chunk;
};

// csrc/ops/rotary.cpp. Rotates the first 2 * half elements of every head of x [tokens][heads][..] in place.
struct RotaryOp {
    static constexpr int kPhases = 1;
    HeadsView x;
    int64_t tokens, heads;
    const float *cos, *sin;  // [tokens][half]
    int64_t half;
    bool interleaved;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, tokens_per_chunk;
};

// csrc/ops/elementwise.cpp. y = a + b.
struct AddOp {
    static constexpr int kPhases = 1;
    const float *a, *b;  // [rows][k], strides in floats between rows
    int64_t a_stride, b_stride, rows, k;
    float* y;  // [rows][k]; may be a or b

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// csrc/ops/elementwise.cpp. y [rows][k] = act(gate) * up, for rows [gate | up] of x. The bits are those of the glu form
// of linear_epilogue, which multiplies the same floats.
struct GluOp {
    static constexpr int kPhases = 1;
    ActivationFunction activation;
    const float* x;  // [rows][2 k], x_stride floats between rows
    int64_t x_stride, rows, k;
    float* y;  // [rows][k]

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// csrc/ops/elementwise.cpp. x *= factor, or x[:, i] *= factors[i], in place. A chunk is a piece of a row: rows of logits
// are few and long.
struct ScaleOp {
    static constexpr int kPhases = 1;
    float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride, rows, k;
    float factor;
    const float* factors;  // [k]; null for `factor`

    void prepare(int) {}
    int64_t chunks(int) const;
    void run(int phase, int64_t chunk, int thread) const;
};

// csrc/ops/elementwise.cpp. x = cap * tanh(x / cap), in place; chunks as in ScaleOp.
struct SoftcapOp {
    static constexpr int kPhases = 1;
    float* x;
    int64_t x_stride, rows, k;
    float cap;

    void prepare(int) {}
    int64_t chunks(int) const;
    void run(int phase, int64_t chunk, int thread) const;
};

// How the n rows of a text become one. Max is the largest value of each column, SqrtMean the sum divided by sqrt(n).
// WeightedMean has weights 1 .. n.
enum class Pooling { First, Max, Mean, SqrtMean, WeightedMean, Last };

// csrc/ops/pool.cpp. Row s of y is made of rows [starts[s], starts[s + 1]) of x.
//
// NUMERICS  One fp32 total for each column, rows in order, so that a text's row never depends on others. A NaN in a
//           column gives NaN.
struct PoolOp {
    static constexpr int kPhases = 1;
    Pooling pooling;
    const float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride, rows, k;
    const int32_t* starts;  // [count + 1], ascending
    int64_t count;
    float* y;  // [count][k]

    void prepare(int threads);  // throws std::invalid_argument for an empty text, and for texts that are not all of x
    int64_t chunks(int) const;
    void run(int phase, int64_t chunk, int thread) const;
};

// csrc/ops/elementwise.cpp. y [count][k] = rows `indices` of x [..][k].
struct GatherRowsOp {
    static constexpr int kPhases = 1;
    const float* x;  // x_stride floats between rows
    const int64_t* indices;
    int64_t x_stride, x_rows, count, k;
    float* y;

    void prepare(int threads);  // throws std::invalid_argument for an index outside x
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// csrc/ops/elementwise.cpp. Row indices[r] of x = row r of `rows`, or their sum with `add`.
struct PlaceRowsOp {
    static constexpr int kPhases = 1;
    float* x;  // [x_rows][k], x_stride floats between rows
    int64_t x_stride, x_rows, k;
    const float* rows;  // [count][k], rows_stride floats between rows
    int64_t rows_stride, count;
    const int64_t* indices;  // [count], ascending; null if row r goes to row r
    bool add;

    void prepare(int threads);  // throws std::invalid_argument for indices outside x or not ascending
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// csrc/ops/sampling.cpp. indices[r] = index of the largest element of row r, the lowest among equals. It is -1 for a
// row with NaN or +infinity, which has no valid choice.
struct ArgmaxOp {
    static constexpr int kPhases = 1;
    const float* logits;  // [rows][n], row_stride floats between rows
    int64_t row_stride, rows, n;
    int64_t* indices;

    void prepare(int) {}
    int64_t chunks(int) const { return rows; }
    void run(int phase, int64_t chunk, int thread) const;
};

// A change of one logit: x = (x < 0 ? x * factor : x / factor) + addend. A token id outside the row is ignored.
struct LogitEdit {
    int32_t token;
    float factor, addend;
};

struct Survey;
struct SampleRules;  // csrc/ops/sample.cpp

// csrc/ops/sample.cpp. Draws a token from every row. It applies temperature, top_k (with all equal to the last), top_p,
// min_p and typical_p in this order, each to the tokens that are left. It then takes the first token, by rising id, at
// which the running sum of weights exp(y - max) exceeds `uniform` times their total.
//
// First, tokens that a mask forbids become -infinity, and then the row's edits are applied. Afterwards the row has its
// original values. A row with edits but no mask is changed in place meanwhile, so only one draw may use it.
//
// Weights of a few candidates are fp64. Those of a whole row are fp32, summed in blocks of kSumBlock.
struct SampleOp {
    static constexpr int kPhases = 1;
    float* logits;  // row_stride floats between rows of n
    int64_t row_stride, n, count;
    const int64_t* rows;           // [count]: the row of each draw
    static int64_t rules_bytes();  // size of a SampleRules
    const SampleRules* rules;      // [count]
    const double* uniform;         // [count], in [0, 1)
    // Draw i has the lists from edit_ends[i - 1] (0 for the first) to edit_ends[i]; null if nothing is edited. A list
    // is the address of its LogitEdits and their count.
    const int64_t *edit_ends, *edit_lists;
    // Bit i % 32 of word i / 32 is set if token i is allowed. Draw i has mask mask_rows[i], or none if that is -1; null
    // if no draw has a mask.
    const int32_t* masks;  // masks_stride words between masks of ceil(n / 32)
    int64_t masks_stride;
    const int64_t* mask_rows;  // [count]
    int64_t* tokens;           // [count], written; -1 if a row has NaN or +infinity, or nothing above -infinity
    // Log-probabilities of the masked row, in max_top columns: for the drawn tokens, and for the num_top likeliest as
    // in LogprobsOp. A row with num_top -1 gets none; no row does if num_top is null.
    const int64_t* num_top;
    int64_t max_top;
    float* logprobs;      // [count], written
    int64_t* top_tokens;  // [count][max_top], written
    float* top_logprobs;  // [count][max_top], written

    void prepare(int) {}
    int64_t chunks(int) const { return count; }
    void run(int phase, int64_t chunk, int thread) const;

    class Edited;
    int64_t draw(int64_t chunk, float* x) const;
    void write_likeliest(int64_t chunk, const float* x, const Survey& given) const;
};

// csrc/ops/sample.cpp. Log-probabilities of one token of every row and of the `top` most likely ones, largest first.
// Among equals the lower id comes first. Places beyond n get -1 and -infinity.
struct LogprobsOp {
    static constexpr int kPhases = 1;
    const float* logits;  // row_stride floats between rows of n
    int64_t row_stride, n, count, top;
    const int64_t *rows, *tokens;  // [count]
    float* logprobs;               // [count], written
    int64_t* top_tokens;           // [count][top], written
    float* top_logprobs;           // [count][top], written

    void prepare(int) {}
    int64_t chunks(int) const { return count; }
    void run(int phase, int64_t chunk, int thread) const;
};

// csrc/ops/sampling.cpp. Sets logits to -inf if their mask bit is clear. Token i has bit i % 32 of word i / 32; bits
// beyond n are ignored. A chunk is a piece of one row.
struct MaskOp {
    static constexpr int kPhases = 1;
    float* logits;  // row_stride floats between rows of n
    int64_t row_stride, n;
    const int32_t* bits;  // [masks][ceil(n / 32)], bits_stride words between masks
    int64_t bits_stride, masks;
    const int64_t* rows;  // [masks]: the row of each mask, all different; null if mask m is for row m

    void prepare(int) {}
    int64_t chunks(int) const { return masks * pieces(); }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t pieces() const;  // in one row
};

}  // namespace pace
