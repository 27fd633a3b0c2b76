// How a matrix product is cut: blocks of rows x blocks of panels, the weights of a block staying in cache over its
// rows.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "pace/ops.h"

namespace pace {

namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a block. Inputs of a block (128 x K-block of the kernel, at most 512 fp32) are 256 KB: half of a small
// second-level cache. More rows would read the weights less often, but 128 already do 64 multiply-adds per byte of
// them.
constexpr int64_t kMaxBlockRows = 128;

// Panels of a block with many rows: its sums (128 rows x 8 panels x 16 x 4 bytes = 64 KB) stay in the second-level
// cache.
constexpr int64_t kGemmPanels = 8;

// Panels of a block with few rows, bound by memory: enough blocks that the last of them keeps no thread waiting for
// long, at least the four that a tile takes, at most what keeps sums small.
constexpr int64_t kMinPanels = 4, kMaxPanels = 64, kBlocksPerThread = 12;
constexpr int64_t kFewRows = 16;

// Up to this many rows, every chunk rounds its inputs anew instead of waiting for a phase of its own: 2 K roundings
// beside at least 64 * K products.
constexpr int64_t kMaxInlineRounding = 2;

}  // namespace

void* thread_workspace(size_t bytes) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    thread_local std::unique_ptr<void, Free> buffer;
    thread_local size_t capacity = 0;
    if (bytes > capacity) {
        buffer.reset();
        capacity = 0;
        const size_t rounded = (bytes + 63) / 64 * 64;
        buffer.reset(std::aligned_alloc(64, rounded));
        if (!buffer) throw std::bad_alloc();
        capacity = rounded;
    }
    return buffer.get();
}

void LinearOp::prepare(int threads) {
    const PackedHeader& h = packed_header(weight);
    table = &kernels();
    if (h.layout != preferred_layout(h.dtype))
        throw std::invalid_argument(std::string("this weight was packed for another instruction set than ") +
                                    table->name +
                                    ", the one in use; pack it again, or select the instruction set before loading");
    k = h.k;
    k_padded = h.k_padded;
    glu = h.glu;
    n_out = glu ? h.n / 2 : h.n;
    panels = h.panels;
    dtype = h.dtype;
    rounds = table->rounds_inputs && dtype == DType::BF16;

    row_blocks = std::max<int64_t>(1, divide_up(rows, kMaxBlockRows));
    rows_per_block = divide_up(divide_up(rows, row_blocks), table->tile_rows) * table->tile_rows;
    row_blocks = divide_up(rows, std::max<int64_t>(1, rows_per_block));
    if (rows <= kFewRows) {
        const int64_t share = panels / (threads * kBlocksPerThread) / kMinPanels * kMinPanels;
        panels_per_block = std::clamp(share, kMinPanels, kMaxPanels);
    } else {
        panels_per_block = kGemmPanels;
    }
    panel_blocks = divide_up(panels, panels_per_block);

    const bool separate = rounds && rows > kMaxInlineRounding;
    rows_per_round = std::max<int64_t>(1, 16 * 1024 / std::max<int64_t>(1, k));
    round_chunks = separate ? divide_up(rows, rows_per_round) : 0;
    workspace = separate ? static_cast<BF16*>(thread_workspace(workspace_bytes())) : nullptr;
}

void LinearOp::run(int phase, int64_t chunk) const {
    if (phase == 0) {
        const int64_t end = std::min(rows, (chunk + 1) * rows_per_round);
        for (int64_t row = chunk * rows_per_round; row < end; ++row)
            table->round_to_bf16(x + row * x_stride, workspace + row * k_padded, k, k_padded);
        return;
    }
    // Neighbouring chunks share panels, so that the weights of one block are read from memory once.
    const int64_t first_row = chunk % row_blocks * rows_per_block;
    const int64_t row_count = std::min(rows_per_block, rows - first_row);
    const int64_t first_panel = chunk / row_blocks * panels_per_block;
    const int64_t panel_count = std::min(panels_per_block, panels - first_panel);

    const int64_t sums_stride = panel_count * kPanelRows;
    const size_t sums_bytes = size_t(row_count) * sums_stride * sizeof(float);
    const bool rounds_here = rounds && !workspace;
    const size_t inputs_bytes = rounds_here ? size_t(row_count) * k_padded * sizeof(BF16) : 0;
    char* scratch = static_cast<char*>(thread_scratch(sums_bytes + inputs_bytes));

    LinearArgs a = {};
    a.x = x + first_row * x_stride;
    a.x_stride = x_stride;
    if (rounds_here) {
        BF16* inputs = reinterpret_cast<BF16*>(scratch + sums_bytes);
        for (int64_t row = 0; row < row_count; ++row)
            table->round_to_bf16(x + (first_row + row) * x_stride, inputs + row * k_padded, k, k_padded);
        a.x = inputs;
        a.x_stride = k_padded;
    } else if (rounds) {
        a.x = workspace + first_row * k_padded;
        a.x_stride = k_padded;
    }
    a.rows = row_count;
    a.panels = static_cast<const char*>(weight) + sizeof(PackedHeader) +
               first_panel * kPanelRows * k_padded * int64_t(dtype_bytes(dtype));
    a.panel_count = panel_count;
    a.k_padded = k_padded;
    a.sums = reinterpret_cast<float*>(scratch);
    a.sums_stride = sums_stride;
    table->linear[size_t(dtype)](a);

    const int64_t panels_per_column_block = glu ? 2 : 1;
    const int64_t first_column = first_panel / panels_per_column_block * kPanelRows;
    EpilogueArgs e = {};
    e.sums = a.sums;
    e.sums_stride = sums_stride;
    e.rows = row_count;
    e.columns = std::min(panel_count / panels_per_column_block * kPanelRows, n_out - first_column);
    e.glu = glu;
    e.activation = activation;
    e.bias = bias ? bias + first_column : nullptr;
    e.up_bias = bias ? bias + n_out + first_column : nullptr;
    e.residual = residual ? residual + first_row * n_out + first_column : nullptr;
    e.residual_stride = n_out;
    e.out = out + first_row * n_out + first_column;
    e.out_stride = n_out;
    table->linear_epilogue(e);
}

void ActivationOp::prepare(int) {
    elements_per_chunk = 16 * 1024;
    chunk_count = divide_up(count, elements_per_chunk);
}

void ActivationOp::run(int, int64_t chunk) const {
    const int64_t begin = chunk * elements_per_chunk;
    kernels().activation(activation, x + begin, y + begin, std::min(elements_per_chunk, count - begin));
}

}  // namespace pace
