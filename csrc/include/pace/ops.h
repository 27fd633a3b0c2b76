// Ops: argument checks, and the division of work into chunks that may run in any order on any thread.
//
// An op is a struct that holds its arguments. prepare(threads) validates them and divides the work. Phase p then has
// chunks(p) independent chunks; all of phase p is done before phase p + 1 begins. run(phase, chunk, thread) runs one
// chunk on one of these threads and may use thread_scratch().
//
// Data that an op passes from one phase to the next lies in a workspace. The executor provides it before every run, and
// ops that run one after the other share it. execute() runs an op on the thread pool; Program (pace/program.h) runs the
// same structs, a whole step of a model at once.
//
// Some work depends on data, such as the expert that a row goes to. prepare() never sees such data, so these rules
// hold.
//
//   - prepare() fixes upper bounds for the number of chunks and the workspace that hold for any data. An empty chunk
//     is claimed and returns at once. A bound may depend on the number of threads, because it changes no result.
//   - An early phase writes a list of the work into the op's own workspace. A chunk of a later phase looks up its part
//     there, or returns if there is none. The workspace is not cleared: read only what was written in this run.
//   - Program runs an op again with other data and without prepare(). A run must not leave state in the op that
//     set_workspace() does not reset.
//   - A choice cannot raise an error, because half of the step is done: every input gets a choice, NaN too.
//   - Rows that are grouped by the choice share memory traffic but no arithmetic. The bits of a row depend on the row,
//     its choice, and an order fixed by numbers (experts ascending). They do not depend on its place in a list.
//   - A choice that another op needs is an ordinary value of the program. Python never sees it.
//
// tests/csrc/test_routed.cpp has an example, with a serial phase of one chunk that sorts.
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

// The callable that the pool runs for one phase of an op.
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

// A buffer of the calling thread that stays valid while its own chunks run.
void* thread_workspace(size_t bytes);

template <class Op>
concept Fetches = requires(Op op) { op.fetch(0, 0); };

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

// The storage format of a weight: a dtype, or codes (pace/ops/weight_layout.py).
struct PackedFormat {
    DType dtype = DType::F32;  // F32 with codes
    Code code = Code::None;
    int64_t group = 0;  // neighbours in a row that share a scale; 0 = the whole row
    bool has_mins = false;
    const int8_t* levels = nullptr;                // [16] levels of U4 codes; null: c - offset
    int offset = -1;                               // for codes of 2 to 6 bits; -1 = half of their range
    GroupScales group_scales = GroupScales::None;  // set for super-blocks
    bool token_inputs = false;                     // for codes of 2 bits with a scale for the whole row
};

// Consecutive rows of a weight with the same format.
struct PackedPart {
    int64_t rows;
    PackedFormat format;
};

// The layout that the table in use has for a weight of this format.
Layout preferred_layout(const PackedFormat& format);

// Bytes of a packed weight, header included. A glu weight of several parts has two: gate and up.
int64_t packed_bytes(int64_t n, int64_t k, const PackedFormat& format, bool glu);
int64_t packed_bytes(const std::vector<PackedPart>& parts, int64_t k, bool glu);

// Writes the header of a weight of zeros into zeroed memory at a 64-byte boundary.
void init_packed(void* weight, int64_t n, int64_t k, const PackedFormat& format, bool glu);
void init_packed(void* weight, const std::vector<PackedPart>& parts, int64_t k, bool glu);

// True if the headers of an existing weight are the ones that init_packed would write.
bool is_packed(const void* weight, int64_t n, int64_t k, const PackedFormat& format, bool glu);
bool is_packed(const void* weight, const std::vector<PackedPart>& parts, int64_t k, bool glu);

// The header of `weight`; throws std::invalid_argument if there is none.
const PackedHeader& packed_header(const void* weight);

// A logical row of a weight, as a row of the part that contains it.
struct RowOfPart {
    const PackedHeader* part;
    int64_t row;
};
RowOfPart find_row(const PackedHeader& weight, int64_t row);

// The part that contains logical rows [row, row + rows). `row` becomes the row in that part. Throws
// std::invalid_argument if there is none.
const PackedHeader& part_of_rows(const void* weight, int64_t& row, int64_t rows);

// Makes the pages of a zeroed weight resident. The thread that will read a page in decode steps writes it first, so the
// system allocates it on that thread's NUMA node. A huge page shared by several threads goes to one of them.
void place_packed(void* weight);

// Packs logical rows [row, row + rows) of a dense weight from a matrix. Several threads may write disjoint rows at
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

// Packs logical rows [row, row + rows) of a quantised weight from codes (ops/quantized_weight.cpp); otherwise like
// PackOp.
struct PackQuantizedOp {
    static constexpr int kPhases = 1;
    void* weight;
    int64_t row, rows;
    const uint8_t* codes;  // [rows][k], or, if paired, [rows][k / 2]; codes_stride bytes between rows
    int64_t codes_stride;
    const float* scales;  // [rows][groups]
    const float* mins;    // [rows][groups], if the weight has minima
    bool paired;          // 4-bit codes, two in a byte, the first in the low bits; k is even

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// Packs logical rows [row, row + rows) of a weight in super-blocks (ops/super_weight.cpp); otherwise like PackOp. A row
// has k / 256 super-blocks, with 256 / group groups each.
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

// Quantises rows of floats to codes and scales (ops/quantize_weights.cpp).
struct QuantizeRowsOp {
    static constexpr int kPhases = 1;
    QuantizeRow row;  // for the first row, without `stage`; outputs of rows are contiguous
    int64_t rows;
    int64_t source_stride;          // elements between rows
    bool nibbles;                   // codes [rows][ceil(k / 2)], the first of two in the low bits; else [rows][k]
    std::atomic<bool>* all_finite;  // set to false if an element is not finite; outputs are then incomplete

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

// Rows in blocks of one of ggml's types, given by ggml's number; `stride` bytes between rows.
struct BlockRows {
    int type;
    const uint8_t* data;
    int64_t stride;
};

// Unpacked codes [rows][k], a byte each, and scales in the format of PackQuantizedOp. Types with super-blocks use the
// scales of PackSuperOp instead. The other arrays are not used.
struct UnpackedRows {
    uint8_t* codes;
    float *scales, *mins;
    int8_t *group_scales, *group_mins;
    F16 *super_scales, *super_mins;
};

// Unpacks rows in ggml's blocks (ops/ggml_blocks.cpp).
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

// Packs logical rows [row, row + rows) of a weight from rows in ggml's blocks; otherwise like PackOp.
struct PackBlocksOp {
    static constexpr int kPhases = 1;
    void* weight;
    int64_t row, rows;
    BlockRows source;
    std::atomic<bool>* all_finite;  // set to false if a scale is not finite

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk, blocks;
};

// Gathers rows ids[t] + offset of a weight into out [count, K]: fp32 if `widen` or quantised, else the weight's dtype.
// ids = null means rows 0..count-1.
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

// Settings of a product: the weight and what is applied around it.
struct LinearOptions {
    Norm norm;  // of x
    const void* weight;
    const int32_t* order = nullptr;  // [k], or null: column j of a quantised weight multiplies x[order[j]]
    const float* bias = nullptr;     // [N], or null
    ActivationFunction activation = {};
    bool apart = false;  // a glu weight gives [gate | up], each as a product of its own
};

class AdapterProducts;

// out [rows, N] = residual + act(norm(x) W' + bias); a glu weight gives out [rows, N / 2] = act(gate) * up.
//
// Inputs need preparation if they are normalised, rounded to bf16 for this table, or quantised for this weight. A
// separate phase prepares them. With very few rows a barrier would cost more, so every thread prepares all inputs for
// itself before its first product.
struct LinearOp : LinearOptions {
    static constexpr int kPhases = 2;  // prepare the inputs; multiply
    const float* x;
    int64_t x_stride;  // elements between rows
    int64_t rows;
    const float* residual;  // [rows, N] contiguous, or null; may equal out
    float* out;             // contiguous
    // Null, or what is added to norm(x) W' + bias: AdaptedLinearOp (adapter_ops.h). A residual comes first, and there is
    // no activation without a gate.
    const AdapterProducts* adapters;
    // Null, or [rows]: raised to the candidates (largest.h) of the rows of out, if there are few. Only for a product
    // without a gate.
    int64_t* largest;

    void prepare(int threads);  // throws std::invalid_argument for a weight of another table's layout
    int64_t chunks(int phase) const {
        return phase == 0 ? input_chunks : row_blocks * (int64_t(block_starts.size()) - 1);
    }
    void run(int phase, int64_t chunk, int thread) const;
    // Fetches what a thread reads first in `phase`, with few rows: the norm's weights, and its first weights.
    void fetch(int phase, int thread) const;

    // Prepared inputs: bf16 or fp32 [rows][k_padded], or quantised (kernels.h). There is one copy, or one for each
    // thread.
    size_t workspace_bytes() const;
    void set_workspace(void* memory) {
        workspace = static_cast<char*>(memory);
        prepared.assign(prepared.size(), false);
    }

  private:
    enum class Inputs { Plain, Shared, PerThread };  // x unchanged; prepared in phase 0; prepared by each thread
    Product product;
    Inputs inputs;
    int64_t input_chunks, rows_per_input_chunk, row_blocks, rows_per_block;
    std::vector<int64_t> block_starts;       // in panels
    std::vector<const char*> first_weights;  // by thread, with few rows
    char* workspace;
    mutable std::vector<char> prepared;  // by thread, with Inputs::PerThread

    void cut_panels(int threads);
    void finish(int64_t first_row, int64_t first_column, int64_t columns, EpilogueArgs sums) const;
    void find_largest(int64_t first_row, int64_t count, int64_t first_column, int64_t columns) const;
    void finish_with_adapters(int64_t first_row, int64_t first_column, int64_t columns, EpilogueArgs sums, int thread,
                              char* scratch) const;
    size_t copy_bytes() const;
    void prepare_inputs(int64_t first_row, int64_t end_row, char* copy) const;
    const char* prepared_inputs(int thread) const;
};

// The panels [first, end) of a weight that a thread starts with if there are few rows and the time goes into reading
// weights.
std::pair<int64_t, int64_t> panels_of_thread(int64_t panels, int thread, int threads);

// Elementwise y = act(x); x may equal y.
struct ActivationOp {
    static constexpr int kPhases = 1;
    ActivationFunction activation;
    const float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride, rows, k;
    float* y;  // [rows][k]

    void prepare(int threads);
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, rows_per_chunk;
};

}  // namespace pace
