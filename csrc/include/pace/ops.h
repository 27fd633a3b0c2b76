// Ops: checks, and how work is cut into chunks that may run in any order on any thread.
//
// An op is a struct that holds its arguments. prepare() validates them and fixes the cut; phase p then has chunks(p)
// independent chunks, and all of phase p is done before phase p + 1 begins. run(phase, chunk) does one of them; it may
// use thread_scratch(). execute() runs an op on the thread pool; the Program executor runs the same structs.
#pragma once

#include <vector>

#include "pace/kernels.h"
#include "pace/threading.h"
#include "pace/types.h"

namespace pace {

template <class Op>
void execute(Op& op) {
    op.prepare(ThreadPool::instance().num_threads());
    struct Body {
        const Op* op;
        int phase;
        void operator()(int64_t chunk, int) const { op->run(phase, chunk); }
    };
    Body bodies[Op::kPhases];
    Phase phases[Op::kPhases];
    for (int p = 0; p < Op::kPhases; ++p) {
        bodies[p] = {&op, p};
        phases[p] = make_phase(op.chunks(p), bodies[p]);
    }
    ThreadPool::instance().run(phases, Op::kPhases);
}

// ---- Packed weights (ops/weight.cpp)

// How the table in use stores a weight of this dtype.
Layout preferred_layout(DType dtype);

// Bytes of a packed weight, header included.
int64_t packed_bytes(int64_t n, int64_t k, DType dtype, bool glu);

// Writes the header of a weight into zeroed memory at a 64-byte boundary: a weight of zeros.
void init_packed(void* weight, int64_t n, int64_t k, DType dtype, bool glu);

// The header of `weight`; throws std::invalid_argument if there is none.
const PackedHeader& packed_header(const void* weight);

// Logical rows [row, row + rows) from a matrix; disjoint rows may be written by several threads at once.
struct PackOp {
    static constexpr int kPhases = 1;
    void* weight;
    int64_t row, rows;
    const void* source;
    DType source_dtype;
    int64_t source_stride;  // elements between rows

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk) const;

    int64_t chunk_count, rows_per_chunk;
};

// Rows of a weight: ids[t] -> out [count, K]; fp32 if widen, else the weight's dtype. ids = null means rows 0..count-1.
struct GatherOp {
    static constexpr int kPhases = 1;
    const void* weight;
    const int64_t* ids;
    int64_t count;
    void* out;
    bool widen;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk) const;

    int64_t chunk_count, rows_per_chunk;
};

// ---- Linear (ops/linear.cpp)

// out [rows, N] = residual + act(x W' + bias); a glu weight gives out [rows, N / 2] = act(gate) * up.
struct LinearOp {
    static constexpr int kPhases = 2;  // round the inputs to bf16, where the table wants that; multiply
    const float* x;
    int64_t x_stride;  // elements between rows
    int64_t rows;
    const void* weight;
    const float* bias;  // [N], or null
    Activation activation;
    const float* residual;  // [rows, N] contiguous, or null; may equal out
    float* out;             // contiguous

    void prepare(int threads);  // throws std::invalid_argument for a weight of another table's layout
    int64_t chunks(int phase) const { return phase == 0 ? round_chunks : row_blocks * panel_blocks; }
    void run(int phase, int64_t chunk) const;

    // Where phase 0 leaves the rounded inputs: rows * k_padded bf16, if workspace_bytes() > 0.
    size_t workspace_bytes() const { return round_chunks ? size_t(rows) * k_padded * sizeof(BF16) : 0; }
    BF16* workspace;

private:
    const KernelTable* table;
    int64_t k, k_padded, n_out, panels;
    DType dtype;
    bool glu, rounds;
    int64_t round_chunks, rows_per_round, row_blocks, rows_per_block, panel_blocks, panels_per_block;
};

// Elementwise y = act(x); x may equal y.
struct ActivationOp {
    static constexpr int kPhases = 1;
    Activation activation;
    const float* x;
    float* y;
    int64_t count;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk) const;

    int64_t chunk_count, elements_per_chunk;
};

// A buffer of the calling thread that outlives its own chunks: for what phase 0 of an op leaves to phase 1.
void* thread_workspace(size_t bytes);

}  // namespace pace
