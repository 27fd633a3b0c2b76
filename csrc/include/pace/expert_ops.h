// Ops on stacks of weights: of a mixture of experts (the choice of a row, and the products with what it chose), and of
// heads.
//
// A routing is fp32 [rows][2 top_k]: the numbers of the chosen experts, ascending, then their weights. It is a value of a
// program like any other (the rules for work that depends on data are in pace/ops.h).
#pragma once

#include <cstdint>
#include <vector>

#include "pace/product.h"
#include "pace/row_ops.h"

namespace pace {

constexpr int64_t kMaxTopK = 64;

// How a row of logits chooses; the fields are those of pace/ops/router.py.
struct Router {
    enum class Score : int { Softmax, Sigmoid, SoftmaxOfChosen, Sparsemixer, SigmoidOfChosen };
    Score score;
    int64_t experts, top_k;
    int64_t groups, kept_groups;  // groups of neighbours, of which the best are chosen from; 1 and 1: all
    bool group_top2;              // a group is as good as its two best together; else as its best
    bool normalise;               // weights are divided by max(their sum + eps, least_sum)
    float eps, least_sum, scale, jitter;
    const float* choice_bias;  // [experts], added to scores for the choice alone; or null

    // Bytes of scratch for a row.
    size_t scratch_bytes() const { return size_t(experts) * (2 * sizeof(float) + 1); }
    // One row of logits [experts] -> routing [2 top_k]. A row whose scores hold NaN chooses the first experts, with NaN
    // as weights. Among equals the lower number goes first.
    void choose(const KernelTable& table, const float* logits, void* scratch, float* routing) const;
};

// csrc/ops/route.cpp. routing [rows][2 top_k] of logits [rows][experts].
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

// One product of every expert: weights of one shape and layout, `stride` bytes apart (pace/ops/kernels/experts.py).
struct ExpertStack {
    const void* weights;
    int64_t stride;
    const float* bias;  // [experts][n], or null
    bool mapped;        // pages of a file, which may have to be read first
    const void* of(int64_t expert) const { return static_cast<const char*>(weights) + expert * stride; }
};

// csrc/ops/experts.cpp. out [rows][H] = residual + w1 f1(x) + w2 f2(x) + ..., the chosen experts ascending, added one by
// one, where fe(x) = act(gate) * up W' + b and gate, up = halves of norm(x) Wg' + bg. Where inputs are weighed,
// f1(w1 x) + f2(w2 x) + ..., computed as halves of w norm(x) Wg' + bg.
//
// Pairs of a row and an expert are sorted by expert, and those of one expert are multiplied together, as blocks of rows:
//
//   phase 0  rows:      choose, where the logits are given; prepare inputs
//   phase 1  one chunk: sort pairs, cut them into blocks
//   phase 2  blocks x panels of gate and up:  hidden [pairs][I], in sorted order
//   phase 3  pairs:     prepare hidden rows as inputs
//   phase 4  panels of down: all blocks, experts ascending, each row added to its token
//
// Where rows are so few that a barrier would cost more, phases 0, 1 and 3 have no chunks: every thread does for itself
// what they do. Not where a stack is mapped: phase 1 then asks the system for the pages of all chosen experts, once, and
// those of later experts are read while the first are multiplied.
struct ExpertsOp {
    static constexpr int kPhases = 5;
    const float* x;  // [rows][K]
    int64_t x_stride, rows;
    Norm norm;             // of x
    const float* routing;  // [rows][2 top_k], or null: chosen from
    const float* logits;   // [rows][experts]
    Router router;
    ExpertStack gate_up, down;  // [2 I, K] with glu, and [H, I]
    GluActivation activation;
    bool weighs_input;      // the weights are those of inputs, not of what experts give
    const float* residual;  // [rows][H] contiguous, or null; may equal out
    float* out;             // contiguous

    void prepare(int threads);  // throws std::invalid_argument for stacks that do not fit each other
    int64_t chunks(int phase) const { return chunk_counts[phase]; }
    void run(int phase, int64_t chunk, int thread) const;

    size_t workspace_bytes() const;
    void set_workspace(void* memory);

  private:
    // Rows [first, first + count) of the sorted pairs, all of one expert.
    struct Block {
        int32_t expert, first, count;
    };
    // Where things are, in one copy of what rows chose: shared, or a thread's own.
    struct Copy {
        float* routing;  // [rows][2 top_k], where it is chosen here
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
    int64_t pairs, most_blocks, rows_per_chunk, pairs_per_chunk, panels_per_block, panel_blocks;
    bool few;             // rows: memory decides, and chunks are shares of what there is to read
    bool alone;           // every thread sorts and prepares for itself
    bool plain, x_plain;  // hidden rows, and x, serve as they are
    int copies;
    std::vector<int64_t> down_starts;  // in panels
    std::vector<double> share_starts;  // of phase 2, where rows are few
    char* workspace;
    float* hidden;                                      // [pairs][I]
    mutable std::vector<char> sorted, hidden_prepared;  // by thread, where alone

    size_t copy_bytes() const;
    Copy copy_of(int thread) const;
    Copy ready(int thread) const;  // after what phases 0 and 1 do
    void prepare_rows(const Copy& copy, int64_t begin, int64_t end) const;
    void sort(const Copy& copy) const;
    void read_ahead(const Copy& copy) const;
    void prepare_hidden(const Copy& copy, int64_t begin, int64_t end) const;
    void multiply_up(const Copy& copy, const Block& block, int64_t first_panel, int64_t end_panel) const;
    void multiply_down(const Copy& copy, int64_t first_panel, int64_t end_panel) const;
};

// csrc/ops/heads_linear.cpp. out [rows][heads][N] = x[row][head] W', of heads [K] and a weight [N, K] for each.
struct HeadsLinearOp {
    static constexpr int kPhases = 1;
    HeadsView x;  // [rows][heads][K]; only read
    int64_t rows, heads;
    ExpertStack weights;  // one for each head, without biases
    float* out;           // contiguous

    void prepare(int threads);
    int64_t chunks(int) const { return heads * row_blocks * panel_blocks; }
    void run(int phase, int64_t chunk, int thread) const;

    // Prepared inputs of the chunk that a thread is at.
    size_t workspace_bytes() const { return size_t(threads) * block_bytes(); }
    void set_workspace(void* memory) { workspace = static_cast<char*>(memory); }

  private:
    Product product;
    int threads;
    int64_t row_blocks, rows_per_block, panel_blocks, panels_per_block;
    char* workspace;

    size_t block_bytes() const;
};

// x [rows][k] times sigmoid(gate [rows]), in place. csrc/ops/elementwise.cpp.
struct GateOp {
    static constexpr int kPhases = 1;
    float* x;
    int64_t x_stride, rows, k;
    const float* gate;
    int64_t gate_stride;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

}  // namespace pace
