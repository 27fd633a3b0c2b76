// Ops: checks, and how work is cut into chunks that may run in any order on any thread.
//
// An op is a struct that holds its arguments. prepare(threads) validates them and fixes the cut; phase p then has
// chunks(p) independent chunks, and all of phase p is done before phase p + 1 begins. run(phase, chunk, thread) does
// one of them on one of these threads; it may use thread_scratch(). What an op leaves from one phase to the next lies
// in a workspace, which the executor provides before every run and which ops that run one after the other share.
// execute() runs an op on the thread pool; Program (pace/program.h) runs the same structs, a whole step of a model at
// once.
//
// Work that depends on data (which expert a row goes to) keeps to that: nobody learns of the data before they are
// computed, so that
//   - prepare() fixes a bound: as many chunks and as much workspace as the data can ask for at most. A chunk that turns
//     out empty is claimed and nothing more. A bound that depends on threads is allowed, for it changes no result;
//   - an early phase writes into the op's own workspace what there is to do, and a chunk of a later phase looks up its
//     part there, or returns. The workspace holds anything before: what is looked up was written in this run;
//   - Program runs an op again with other data and without prepare(): a run leaves nothing in the op itself that
//     set_workspace() does not reset;
//   - a choice cannot be refused, for half of the step is done: every input gets one, NaN too;
//   - rows that the choice brings together share memory traffic and no arithmetic: the bits of a row depend on the row,
//     its choice, and an order fixed by numbers (experts ascending), not on its place in a list;
//   - what another op has to know of a choice is a value of the program like any other. Python sees none of it.
// tests/csrc/test_routed.cpp is such an op, with a serial phase of one chunk that sorts.
#pragma once

#include <atomic>
#include <concepts>
#include <utility>
#include <vector>

#include "pace/kernels.h"
#include "pace/product.h"
#include "pace/row_ops.h"
#include "pace/threading.h"
#include "pace/types.h"

namespace pace {

// What the pool calls for one phase of an op.
template <class Op>
struct PhaseBody {
    const Op* op;
    int phase;
    void operator()(int64_t chunk, int thread) const { op->run(phase, chunk, thread); }
};

template <class Op>
concept HasWorkspace = requires(Op op, void* memory) {
    { op.workspace_bytes() } -> std::same_as<size_t>;
    op.set_workspace(memory);
};

// A buffer of the calling thread that outlives its own chunks.
void* thread_workspace(size_t bytes);

template <class Op>
void execute(Op& op) {
    op.prepare(ThreadPool::instance().num_threads());
    if constexpr (HasWorkspace<Op>) op.set_workspace(thread_workspace(op.workspace_bytes()));
    PhaseBody<Op> bodies[Op::kPhases];
    Phase phases[Op::kPhases];
    for (int p = 0; p < Op::kPhases; ++p) {
        bodies[p] = {&op, p};
        phases[p] = make_phase(op.chunks(p), bodies[p]);
    }
    ThreadPool::instance().run(phases, Op::kPhases);
}

// ---- Packed weights (ops/weight.cpp)

// How a weight is stored: a dtype, or codes (pace/ops/weight_layout.py).
struct PackedFormat {
    DType dtype = DType::F32;  // F32 with codes
    Code code = Code::None;
    int64_t group = 0;  // neighbours in a row that share a scale; 0 = the whole row
    bool has_mins = false;
    const int8_t* levels = nullptr;                // [16], of U4; null = c - offset
    int offset = -1;                               // of codes of 2 to 6 bits; -1 = half of their range
    GroupScales group_scales = GroupScales::None;  // in super-blocks
};

// Rows of a weight that are stored alike.
struct PackedPart {
    int64_t rows;
    PackedFormat format;
};

// How the table in use stores a weight of this format.
Layout preferred_layout(const PackedFormat& format);

// Bytes of a packed weight, header included. Of several parts: a glu weight has two, gate and up.
int64_t packed_bytes(int64_t n, int64_t k, const PackedFormat& format, bool glu);
int64_t packed_bytes(const std::vector<PackedPart>& parts, int64_t k, bool glu);

// Writes the header of a weight into zeroed memory at a 64-byte boundary: a weight of zeros.
void init_packed(void* weight, int64_t n, int64_t k, const PackedFormat& format, bool glu);
void init_packed(void* weight, const std::vector<PackedPart>& parts, int64_t k, bool glu);

// Whether the headers of a weight that somebody else made are those that init_packed writes.
bool is_packed(const void* weight, int64_t n, int64_t k, const PackedFormat& format, bool glu);
bool is_packed(const void* weight, const std::vector<PackedPart>& parts, int64_t k, bool glu);

// The header of `weight`; throws std::invalid_argument if there is none.
const PackedHeader& packed_header(const void* weight);

// A logical row of a weight, as a row of the part that holds it.
struct RowOfPart {
    const PackedHeader* part;
    int64_t row;
};
RowOfPart find_row(const PackedHeader& weight, int64_t row);

// The part that holds logical rows [row, row + rows), which becomes rows of it; throws std::invalid_argument where there is none.
const PackedHeader& part_of_rows(const void* weight, int64_t& row, int64_t rows);

// Makes the pages of a weight of zeros resident, each written first by the thread that will read it in decode steps:
// the system then takes it from the memory next to that thread. A huge page goes to one of those that share it.
void place_packed(void* weight);

// Logical rows [row, row + rows) of a dense weight from a matrix; disjoint rows may be written by several threads at
// once.
struct PackOp {
    static constexpr int kPhases = 1;
    void* weight;
    int64_t row, rows;
    const void* source;
    DType source_dtype;
    int64_t source_stride;  // elements between rows

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// Logical rows [row, row + rows) of a quantised weight from codes (ops/quantized_weight.cpp); as PackOp otherwise.
struct PackQuantizedOp {
    static constexpr int kPhases = 1;
    void* weight;
    int64_t row, rows;
    const uint8_t* codes;  // [rows][k], or, if paired, [rows][k / 2]; codes_stride bytes between rows
    int64_t codes_stride;
    const float* scales;  // [rows][groups]
    const float* mins;    // [rows][groups], where the weight has minima
    bool paired;          // codes of four bits, two a byte, the first in the low bits; k is even

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// Logical rows [row, row + rows) of a weight in super-blocks (ops/super_weight.cpp); as PackOp otherwise. A row has k / 256
// super-blocks, and 256 / group groups in each.
struct PackSuperOp {
    static constexpr int kPhases = 1;
    void* weight;
    int64_t row, rows;
    const uint8_t* codes;  // [rows][k], codes_stride bytes between rows
    int64_t codes_stride;
    const int8_t *group_scales, *group_mins;  // [rows][groups]
    const F16 *scales, *mins;                 // [rows][super-blocks]

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// Codes and scales of rows of floats (ops/quantize_weights.cpp).
struct QuantizeRowsOp {
    static constexpr int kPhases = 1;
    QuantizeRow row;  // of the first row, without `stage`; outputs of rows follow each other
    int64_t rows;
    int64_t source_stride;          // elements between rows
    bool nibbles;                   // codes [rows][ceil(k / 2)], the first of two in the low bits; else [rows][k]
    std::atomic<bool>* all_finite;  // set to false where an element is not; outputs are then incomplete

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// Rows in blocks of one of ggml's types, by its number there; `stride` bytes between rows.
struct BlockRows {
    int type;
    const uint8_t* data;
    int64_t stride;
};

// Codes [rows][k], a byte each, and scales, as PackQuantizedOp takes them, or PackSuperOp where the type has
// super-blocks. The other arrays are not touched.
struct UnpackedRows {
    uint8_t* codes;
    float *scales, *mins;
    int8_t *group_scales, *group_mins;
    F16 *super_scales, *super_mins;
};

// Rows in ggml's blocks, unpacked (ops/ggml_blocks.cpp).
struct UnpackBlocksOp {
    static constexpr int kPhases = 1;
    BlockRows source;
    int64_t rows, k;
    UnpackedRows out;

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk, blocks;
};

// Logical rows [row, row + rows) of a weight from rows in ggml's blocks; as PackOp otherwise.
struct PackBlocksOp {
    static constexpr int kPhases = 1;
    void* weight;
    int64_t row, rows;
    BlockRows source;
    std::atomic<bool>* all_finite;  // set to false where a scale is not

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk, blocks;
};

// Rows of a weight: ids[t] + offset -> out [count, K]; fp32 if widen or quantised, else the weight's dtype. ids = null
// means rows 0..count-1.
struct GatherOp {
    static constexpr int kPhases = 1;
    const void* weight;
    const int64_t* ids;
    int64_t count;
    void* out;
    bool widen;
    int64_t offset;
    const int32_t* order;  // [k], or null: column j of the codes belongs to column order[j] of out

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// ---- Linear (ops/linear.cpp)

// out [rows, N] = residual + act(norm(x) W' + bias); a glu weight gives out [rows, N / 2] = act(gate) * up.
//
// Inputs that are normalised, rounded to bf16 because the table wants that, or quantised because the weight is, are
// prepared first: by a phase of its own, or, where there are so few rows that a barrier would cost more, by every
// thread for itself before its first product.
struct LinearOp {
    static constexpr int kPhases = 2;  // prepare the inputs; multiply
    const float* x;
    int64_t x_stride;  // elements between rows
    int64_t rows;
    Norm norm;  // of x
    const void* weight;
    const int32_t* order;  // [k], or null: column j of a quantised weight multiplies x[order[j]]
    const float* bias;     // [N], or null
    Activation activation;
    const float* residual;  // [rows, N] contiguous, or null; may equal out
    float* out;             // contiguous

    void prepare(int threads);  // throws std::invalid_argument for a weight of another table's layout
    int64_t chunks(int phase) const {
        return phase == 0 ? input_chunks : row_blocks * (int64_t(block_starts.size()) - 1);
    }
    void run(int phase, int64_t chunk, int thread) const;

    // Prepared inputs, bf16 or fp32 [rows][k_padded] or quantised (kernels.h): one copy, or one for each thread.
    size_t workspace_bytes() const;
    void set_workspace(void* memory) {
        workspace = static_cast<char*>(memory);
        prepared.assign(prepared.size(), false);
    }

  private:
    enum class Inputs { Plain, Shared, PerThread };  // x as it is; prepared by phase 0; prepared by each thread
    Product product;
    Inputs inputs;
    int64_t input_chunks, rows_per_input_chunk, row_blocks, rows_per_block;
    std::vector<int64_t> block_starts;  // in panels
    char* workspace;
    mutable std::vector<char> prepared;  // by thread, with Inputs::PerThread

    void cut_panels(int threads);
    void finish(int64_t first_row, int64_t first_column, int64_t columns, EpilogueArgs sums) const;
    size_t copy_bytes() const;
    void prepare_inputs(int64_t first_row, int64_t end_row, char* copy) const;
    const char* prepared_inputs(int thread) const;
};

// The panels [first, end) of a weight that a thread begins with where there are few rows, which is when reading them is
// what takes the time.
std::pair<int64_t, int64_t> panels_of_thread(int64_t panels, int thread, int threads);

// Elementwise y = act(x); x may equal y.
struct ActivationOp {
    static constexpr int kPhases = 1;
    Activation activation;
    const float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride, rows, k;
    float* y;  // [rows][k]

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

}  // namespace pace
