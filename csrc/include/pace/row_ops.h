// Ops whose rows are independent: norms, rotary embedding, and what sampling needs. For how an op is used see
// pace/ops.h.
#pragma once

#include "pace/kernels.h"

namespace pace {

// Heads [tokens][heads][head_dim] in memory: the elements of a head are neighbours, strides are in floats.
struct HeadsView {
    float* data;
    int64_t token_stride, head_stride;
    float* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// A norm of rows and its parameters; see kernels/norm.inl.
struct Norm {
    enum class Kind : int { None, Rms, Layer } kind;
    const float* weight;  // [k]; may be null for Layer
    const float* bias;    // [k], Layer only; or null
    float eps;
    int64_t head_stride = 0;  // of norms of heads: floats from the weights of a head to those of the next; 0: the same

    explicit operator bool() const { return kind != Kind::None; }
};

// csrc/ops/norm.cpp. y = norm(x).
struct NormOp {
    static constexpr int kPhases = 1;
    Norm norm;
    const float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride;
    int64_t rows, k;
    float* y;  // [rows][k]

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// csrc/ops/norm.cpp. x [k] = norm(x), where x is head number `head`.
void norm_head(const Norm& norm, int64_t head, float* x, int64_t k);

// csrc/ops/norm.cpp. The norm of every head of x [tokens][heads][head_dim], in place.
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

// csrc/ops/elementwise.cpp. x *= factor, in place. A chunk is a piece of a row: rows of logits are few and long.
struct ScaleOp {
    static constexpr int kPhases = 1;
    float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride, rows, k;
    float factor;

    void prepare(int) {}
    int64_t chunks(int) const;
    void run(int phase, int64_t chunk, int thread) const;
};

// csrc/ops/elementwise.cpp. x = cap * tanh(x / cap), as ScaleOp.
struct SoftcapOp {
    static constexpr int kPhases = 1;
    float* x;
    int64_t x_stride, rows, k;
    float cap;

    void prepare(int) {}
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

    void prepare(int threads);  // throws std::invalid_argument for an index outside of x
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// csrc/ops/sampling.cpp. indices[r] = where row r is largest, the lowest index among equals; -1 for a row with NaN or
// +infinity, which nobody may choose from.
struct ArgmaxOp {
    static constexpr int kPhases = 1;
    const float* logits;  // [rows][n], row_stride floats between rows
    int64_t row_stride, rows, n;
    int64_t* indices;

    void prepare(int) {}
    int64_t chunks(int) const { return rows; }
    void run(int phase, int64_t chunk, int thread) const;
};

// csrc/ops/sampling.cpp. y = softmax or log_softmax of every row.
struct SoftmaxOp {
    static constexpr int kPhases = 1;
    bool log;
    const float* logits;  // [rows][n], row_stride floats between rows
    int64_t row_stride, rows, n;
    float* y;  // [rows][n]

    void prepare(int) {}
    int64_t chunks(int) const { return rows; }
    void run(int phase, int64_t chunk, int thread) const;
};

// csrc/ops/sampling.cpp. Sets to -inf in every row all but the top_k largest (and what equals the last of them), then
// all but the nucleus of mass top_p among those: by falling value, then rising index, the elements before which less
// than top_p of the mass lies, and always the first. top_k <= 0 and top_p >= 1 are off. A row with NaN or +inf gets no
// nucleus.
struct TopKTopPOp {
    static constexpr int kPhases = 1;
    float* logits;  // [rows][n], row_stride floats between rows
    int64_t row_stride, rows, n;
    const int64_t* top_k;
    const float* top_p;

    void prepare(int) {}
    int64_t chunks(int) const { return rows; }
    void run(int phase, int64_t chunk, int thread) const;
};

// A change of one logit: x = (x < 0 ? x * factor : x / factor) + addend. A token that the row does not have is passed
// over.
struct LogitEdit {
    int32_t token;
    float factor, addend;
};

struct Survey;

// csrc/ops/sample.cpp. Draws a token of every row: temperature, top_k (with what equals the last), top_p, min_p and
// typical_p, in this order, each over what is left, then the first token at which the sum of the weights exp(y - max),
// in rising order of the ids, exceeds `uniform` of the sum of all.
//
// Before, what a mask bans is -infinity, and then the row is edited. Afterwards it is as it was: a row with edits and
// without a mask is changed meanwhile, and drawn from once.
//
// Weights of a few candidates are in fp64. Those of a whole row are in fp32, and summed block by block of kSumBlock.
struct SampleOp {
    static constexpr int kPhases = 1;
    float* logits;  // row_stride floats between rows of n
    int64_t row_stride, n, count;
    const int64_t* rows;  // [count]: what is drawn from
    // [count]; 1, 1, 0 and 1 are off. Temperature 0 takes the largest, as ArgmaxOp.
    const float *temperature, *top_p, *min_p, *typical_p;
    const int64_t* top_k;   // [count]; 0 is off
    const double* uniform;  // [count], in [0, 1)
    // The lists of draw i are those from edit_ends[i - 1] (0 for the first) to edit_ends[i]; null where nothing is
    // edited. A list is the address of its LogitEdits and how many they are.
    const int64_t *edit_ends, *edit_lists;
    // Bit i % 32 of word i / 32 is set where token i is allowed. Draw i has mask mask_rows[i], or none where that is -1;
    // null where none has.
    const int32_t* masks;  // masks_stride words between masks of ceil(n / 32)
    int64_t masks_stride;
    const int64_t* mask_rows;  // [count]
    int64_t* tokens;           // [count], written; -1 where a row holds NaN or +infinity, or nothing above -infinity
    // Log-probabilities of the row as its mask leaves it, in most_top columns: of those tokens, and of the num_top
    // likeliest as in LogprobsOp. None of a row where num_top is -1, or of all where it is null.
    const int64_t* num_top;
    int64_t most_top;
    float* logprobs;      // [count], written
    int64_t* top_tokens;  // [count][most_top], written
    float* top_logprobs;  // [count][most_top], written

    void prepare(int) {}
    int64_t chunks(int) const { return count; }
    void run(int phase, int64_t chunk, int thread) const;

    class Edited;
    int64_t draw(int64_t chunk, float* x) const;
    void write_likeliest(int64_t chunk, const float* x, const Survey& given) const;
};

// csrc/ops/sample.cpp. Log-probabilities of a token of every row, and of the `top` most likely ones, largest first, the
// lower id first among equals; -1 and -infinity beyond n.
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

// csrc/ops/sampling.cpp. Sets logits to -inf where a mask's bit is clear: bit i % 32 of word i / 32 is that of token i,
// and what a mask holds beyond n is not looked at. A chunk is a piece of one row.
struct MaskOp {
    static constexpr int kPhases = 1;
    float* logits;  // row_stride floats between rows of n
    int64_t row_stride, n;
    const int32_t* bits;  // [masks][ceil(n / 32)], bits_stride words between masks
    int64_t bits_stride, masks;
    const int64_t* rows;  // [masks]: the row that each mask is for, no row twice; null where mask m is for row m

    void prepare(int) {}
    int64_t chunks(int) const { return masks * pieces(); }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t pieces() const;  // of a row
};

}  // namespace pace
