// Ops on states (pace/states.h), and gates. For the use of an op see pace/ops.h.
#pragma once

#include <vector>

#include "pace/kernels.h"
#include "pace/row_ops.h"

namespace pace {

// csrc/ops/states.cpp. Throws std::invalid_argument unless the spans cover `tokens` in order and fit this number of
// slots and rows of their journals.
void check_spans(const StateSpans& spans, int64_t tokens, int64_t slots, int64_t journal_rows);

// csrc/ops/elementwise.cpp. x [rows][k] *= f(gate [rows][groups]) in place: k / groups columns for each gate.
struct GateOp {
    static constexpr int kPhases = 1;
    Gate kind;
    float* x;
    int64_t x_stride, rows, k;
    const float* gate;
    int64_t gate_stride, groups;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// The parameters of a gated norm, over each of `groups` equal parts of a row.
struct GatedNorm {
    Gate kind;
    bool norm_first;
    int64_t groups;
    const float* weight;    // [k], or [k / groups] with weight_stride 0
    int64_t weight_stride;  // between the weights of neighbouring parts
    float eps;
};

// csrc/ops/norm.cpp. y = rms_norm(x) f(gate) if norm_first, else rms_norm(x f(gate)).
struct GatedNormOp {
    static constexpr int kPhases = 1;
    GatedNorm norm;
    const float *x, *gate;  // [rows][k]
    int64_t x_stride, gate_stride, rows, k;
    float* y;  // [rows][k]

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// The parameters of a causal convolution.
struct Convolution {
    const float* weight;  // [kernel][channels]
    const float* bias;    // [channels], or null
    bool silu;
};

// csrc/ops/causal_conv.cpp. out [tokens][channels] = the convolution over each span and its slot.
//
// A chunk is some tokens of a span and some channels. The first tokens of a span read what its slot holds, and then
// write everything that the span writes of these channels. The others only need inputs of the span.
struct CausalConvOp {
    static constexpr int kPhases = 1;
    Convolution convolution;
    const float* x;  // [tokens][channels], x_stride floats between rows
    int64_t x_stride, tokens;
    StateSlots slots;
    StateSpans spans;
    float* out;

    void prepare(int threads);
    int64_t chunks(int) const { return int64_t(pieces.size()) * blocks; }
    void run(int phase, int64_t chunk, int thread) const;

  private:
    struct Piece {
        int32_t span;
        int64_t first, end;  // tokens of the span
    };
    std::vector<Piece> pieces;
    int64_t blocks, channels_per_block;

    void write(int64_t span, int64_t channel, int64_t count, const float* past) const;
};

// The parameters of a recurrence.
struct Recurrence {
    const float *rates, *step_bias;  // [heads], [heads][decay_dim]
    bool delta, tiled;
    float lower_bound, beta_scale;
    const float* skip;  // [heads], or null
    float min_step, max_step;
};

// csrc/ops/recurrence.cpp. out [tokens][heads * value_dim] = the recurrence of every head over each span and its slot.
//
// A chunk is a span and a head, or some columns of its matrix. It works on a copy that stays in the nearest caches, and
// reads the journal of its head before it writes it. A span of one token works on the slots themselves, in one stream.
struct RecurrenceOp {
    static constexpr int kPhases = 1;
    Recurrence recurrence;
    HeadsView q, k, v;
    int64_t key_heads, tokens;
    const float *steps, *beta;  // [tokens][heads * decay_dim]; [tokens][heads], or null without delta
    int64_t steps_stride, beta_stride;
    StateSlots slots;
    StateSpans spans;
    float* out;

    void prepare(int threads);
    int64_t chunks(int) const { return first_chunk.back(); }
    void run(int phase, int64_t chunk, int thread) const;

  private:
    struct Columns;
    std::vector<int32_t> order;        // spans, the longest first
    std::vector<int64_t> first_chunk;  // of each span in this order, and the end
    int64_t panel;                     // columns that are swept together

    TokenInputs inputs_of(int64_t first_token, int64_t count, int64_t head) const;
    void replay(const Columns& columns, int64_t slot, int64_t rows) const;
    void sweep(const Columns& columns, int64_t first_token, int64_t count, Strided<float> deltas) const;
};

}  // namespace pace
