// Ops on stacks of weights: mixtures of experts (routing, and the products with the chosen experts), and one weight per
// head.
//
// A routing is fp32 [rows][2 top_k]: the numbers of the chosen experts, ascending, then their weights. It is an
// ordinary value of a program (pace/ops.h has the rules for work that depends on data).
#pragma once

#include <cstdint>
#include <vector>

#include "pace/product.h"
#include "pace/row_ops.h"

namespace pace {

constexpr int64_t kMaxTopK = 64;

// How a row of logits chooses experts; the fields are those of pace/ops/experts.py.
struct Router {
    enum class Score : int { Softmax, Sigmoid, SoftmaxOfChosen, Sparsemixer, SigmoidOfChosen };
    Score score;
    int64_t experts, top_k;
    int64_t groups, kept_groups;  // consecutive experts form groups, and only the best groups are kept; 1 and 1: all
    bool group_top2;              // a group's score is the sum of its best two experts; else its best expert
    bool normalise;               // divide weights by max(their sum + eps, least_sum)
    float eps, least_sum, scale, jitter;
    const float* choice_bias;   // [experts], added to scores only for the choice; or null
    const float* expert_scale;  // [experts], multiplies weights at the end; or null

    // Bytes of scratch for a row.
    size_t scratch_bytes() const { return size_t(experts) * (2 * sizeof(float) + 1); }
    // One row of logits [experts] -> routing [2 top_k]. A row whose scores contain NaN chooses the first experts, with
    // NaN as weights. Among equal scores the lower expert number comes first.
    void choose(const KernelTable& table, const float* logits, void* scratch, float* routing) const;
};

// csrc/ops/route.cpp. Computes routing [rows][2 top_k] from logits [rows][experts].
struct RouteOp {
    static constexpr int kPhases = 1;
    const float* logits;
    int64_t logits_stride, rows;
    Router router;
    float* routing;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// One weight for every expert: the same shape and layout, `stride` bytes apart (pace/ops/kernels/experts.py).
struct ExpertStack {
    const void* weights;
    int64_t stride;
    bool mapped;  // memory-mapped from a file: pages may have to be read first
    const void* of(int64_t expert) const { return static_cast<const char*>(weights) + expert * stride; }
};

// Settings of a layer's experts: ExpertOptions of pace/ops/protocol.py.
struct ExpertOptions {
    ActivationFunction activation;
    const float *gate_up_bias, *down_bias;  // [experts][n], or null
    bool weigh_inputs;                      // routing weights multiply the experts' inputs, not their outputs
};

// A layer's experts.
struct Mixture {
    Norm norm;  // of x
    Router router;
    ExpertStack gate_up, down;  // gate_up [2 I, K] with glu or [I, K] without, and down [H, I]
    ExpertOptions options;
};

// csrc/ops/experts.cpp. out [rows][H] = residual + w1 f1(x) + w2 f2(x) + ..., added one by one for the chosen experts,
// in ascending order. fe(x) = act(gate) * up W' + b, with gate, up = halves of norm(x) Wg' + bg.
// Without glu, fe(x) = act(norm(x) Wg' + bg) W' + b.
// If inputs are weighed, the sum is f1(w1 x) + f2(w2 x) + ..., with w norm(x) in place of norm(x).
//
// Pairs of a row and an expert are sorted by expert. The pairs of one expert are multiplied together, as blocks of
// rows:
//
//   kRoute  rows:      choose, if logits are given; prepare inputs.
//   kSort   one chunk: sort pairs, cut them into blocks.
//   kUp     blocks x panels of gate and up:  hidden [pairs][I], in sorted order.
//   kHidden pairs:     prepare hidden rows as inputs.
//   kDown   panels of down: all blocks, experts ascending, each row added to its token.
//
// With very few rows a barrier would cost more than it saves. kRoute, kSort and kHidden then have no chunks, and every
// thread does their work for itself. An exception is a mapped stack: kSort then asks the system once for the pages of
// all chosen experts. Pages of later experts are read while earlier experts are multiplied.
struct ExpertsOp : Mixture {
    enum Phases : int { kRoute, kSort, kUp, kHidden, kDown, kPhases };
    const float* x;  // [rows][K]
    int64_t x_stride, rows;
    const float* routing;   // [rows][2 top_k]; if null, computed from logits
    const float* logits;    // [rows][experts]
    const float* residual;  // [rows][H] contiguous, or null; may equal out
    float* out;             // contiguous

    void prepare(int threads);  // throws std::invalid_argument if the stacks do not fit each other
    int64_t chunks(int phase) const { return chunk_counts[phase]; }
    void run(int phase, int64_t chunk, int thread) const;

    size_t workspace_bytes() const;
    void set_workspace(void* memory);

  private:
    // Rows [first, first + count) of the sorted pairs, all for one expert.
    struct Block {
        int32_t expert, first, count;
    };
    // Addresses in one copy of the routed data: shared, or one thread's own.
    struct Copy {
        float* routing;  // [rows][2 top_k], if computed here
        int32_t* block_count;
        Block* blocks;
        int32_t* row_of;  // [pairs]
        float* weight;    // [pairs]
        char* inputs;     // [rows] prepared
        char* hidden;     // [pairs] prepared
    };
    struct Cut {
        int64_t first, end;
    };

    Product first, second;
    int64_t chunk_counts[kPhases];
    int64_t pairs, max_blocks, rows_per_chunk, pairs_per_chunk, panels_per_block, panel_blocks;
    bool few;             // few rows: memory-bound, and chunks are shares of the weights to read
    bool per_thread;      // every thread sorts and prepares for itself
    bool plain, x_plain;  // hidden rows, and x, need no preparation
    int copies;
    std::vector<int64_t> down_starts;  // in panels
    std::vector<double> share_starts;  // for kUp, if rows are few
    char* workspace;
    float* hidden;                                      // [pairs][I]
    mutable std::vector<char> sorted, hidden_prepared;  // by thread, if per_thread

    size_t copy_bytes() const;
    Copy copy_of(int thread) const;
    Copy ready(int thread) const;  // after the work of kRoute and kSort
    void prepare_rows(const Copy& copy, int64_t begin, int64_t end) const;
    void sort(const Copy& copy) const;
    void read_ahead(const Copy& copy) const;
    void prepare_hidden(const Copy& copy, int64_t begin, int64_t end) const;
    void multiply_up(const Copy& copy, const Block& block, int64_t first_panel, int64_t end_panel) const;
    void multiply_down(const Copy& copy, int64_t first_panel, int64_t end_panel) const;
};

// csrc/ops/heads_linear.cpp. out [rows][heads][N] = x[row][head] W', for heads [K] with one weight [N, K] each.
struct HeadsLinearOp {
    static constexpr int kPhases = 1;
    HeadsView x;  // [rows][heads][K]; read only
    int64_t rows, heads;
    ExpertStack weights;  // one for each head, without biases
    float* out;           // contiguous

    void prepare(int threads);
    int64_t chunks(int) const { return heads * row_blocks * panel_blocks; }
    void run(int phase, int64_t chunk, int thread) const;

    // Holds the prepared inputs of each thread's current chunk.
    size_t workspace_bytes() const { return size_t(threads) * block_bytes(); }
    void set_workspace(void* memory) { workspace = static_cast<char*>(memory); }

  private:
    Product product;
    int threads;
    int64_t row_blocks, rows_per_block, panel_blocks, panels_per_block;
    char* workspace;

    size_t block_bytes() const;
};

}  // namespace pace
