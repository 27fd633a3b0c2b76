// States of layers that keep a fixed amount of a sequence: slots, spans, and what the kernels of kernels/states.inl
// take. pace/states.py has the contract.
#pragma once

#include <cstdint>

namespace pace {

// The slots of one layer. Parts that the layer does not have are null.
struct StateSlots {
    float* inputs;          // [slots][kernel - 1][channels]
    float* matrix;          // [slots][heads][key_dim][value_dim]
    float* journal_inputs;  // [slots][journal_rows][channels]
    float* journal;         // [slots][journal_rows][heads][journal_dim()]
    int64_t slots, stride;  // floats between slots, for every part
    int64_t journal_rows;
    int64_t channels, kernel, heads, key_dim, value_dim, decay_dim;

    int64_t journal_dim() const { return decay_dim + key_dim + value_dim; }
    float* inputs_of(int64_t slot) const { return inputs + slot * stride; }
    float* matrix_of(int64_t slot, int64_t head) const { return matrix + slot * stride + head * key_dim * value_dim; }
    float* journal_inputs_of(int64_t slot, int64_t row) const {
        return journal_inputs + slot * stride + row * channels;
    }
    // [decay | key | delta]
    float* journal_of(int64_t slot, int64_t row, int64_t head) const {
        return journal + slot * stride + (row * heads + head) * journal_dim();
    }
};

// What a step reads and writes of the slots, for each span.
struct StateSpans {
    const int32_t* query_start;  // [count + 1]
    const int32_t *read, *replay, *write, *certain;
    const int32_t* mark_start;  // [count + 1]
    const int32_t *mark_rows, *mark_slots;
    int64_t count, marks;
};

// Added to the sum of squares of a query or key before its root is taken (UNIT_EPS of pace/ops/protocol.py).
constexpr float kUnitEps = 1e-6f;

// Functions of the gate in gate_ and gated_norm.
enum class Gate : int { None, Sigmoid, Silu, Softplus };

// causal_conv: one row of outputs. out = act(bias + weight[0] inputs[0] + weight[1] inputs[1] + ...).
struct ConvRow {
    const float* const* inputs;  // [kernel] rows of `channels`, the oldest first
    const float* weight;         // [kernel][channels], weight_stride floats between rows
    int64_t weight_stride;
    const float* bias;  // [channels], or null
    bool silu;
    int64_t kernel, channels;
    float* out;
};

// Number of tokens of a head that are prepared together. Their keys and queries stay in the first-level cache.
constexpr int kStateTokens = 16;

// Tokens of one head, as the sweeps over its matrix use them. Rows of vectors are `stride` floats apart.
struct PreparedTokens {
    float *key, *read_key, *read_query;  // k; decay * k and decay * q, or q without the delta rule
    float* decay;                        // decay_stride floats between tokens: 1, or `stride`
    float *gain, *dot;                   // factor of delta (beta, or the step); q k
    int64_t stride, decay_stride;
};

// prepare_tokens: at most kStateTokens tokens of one head. Inputs are strided by token.
struct TokenInputs {
    int64_t count, key_dim, decay_dim;
    bool delta;
    const float *q, *k, *steps, *beta;
    int64_t q_stride, k_stride, steps_stride, beta_stride;
    float rate, lower_bound, beta_scale, min_step, max_step;
    const float* step_bias;  // [decay_dim]
};

// A matrix [key_dim][columns] with rows `stride` floats apart.
template <class T>
struct Strided {
    T* data;
    int64_t stride;
};

// sweep_tokens: `count` tokens of one head, one after the other, for some columns of its matrix.
struct TokenSweep {
    PreparedTokens tokens;
    int64_t count, key_dim, decay_dim, columns;
    bool delta;
    int64_t block_rows;          // rows of the matrix that are read, or written, for all columns before the next ones
    Strided<const float> from;   // the matrix before the first token
    Strided<float> to;           // written after each token
    Strided<const float> v;      // [count]
    Strided<float> out, deltas;  // [count], written
    const float* skip;           // one number, or null
    float* sums;                 // scratch, [2][round_up(columns, 16)]
};

// update_matrix: to = decay * from + key delta', as a sweep does.
struct MatrixUpdate {
    int64_t key_dim, decay_dim, columns;
    Strided<const float> from;
    Strided<float> to;
    const float *decay, *key, *delta;
};

}  // namespace pace
