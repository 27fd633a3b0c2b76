// Cuts the products of heads, each with its own weight, into heads x blocks of rows x blocks of panels.
#include <algorithm>

#include "pace/expert_ops.h"
#include "pace/ops.h"

namespace pace {

namespace {

// As in ops/linear.cpp.
constexpr int64_t kMaxBlockRows = 128;
// Minimum panels in a chunk, and the wanted number of chunks for each thread.
constexpr int64_t kMinPanels = 4, kChunksPerThread = 4;

}  // namespace

void HeadsLinearOp::prepare(int thread_count) {
    threads = thread_count;
    product.describe(weights.weights, false);
    row_blocks = std::max<int64_t>(1, divide_up(rows, kMaxBlockRows));
    rows_per_block = divide_up(divide_up(rows, row_blocks), product.table->tile_rows) * product.table->tile_rows;
    row_blocks = divide_up(rows, std::max<int64_t>(1, rows_per_block));
    // Each block of panels prepares the inputs again.
    const int64_t wanted = divide_up(kChunksPerThread * threads, std::max<int64_t>(1, heads * row_blocks));
    panels_per_block = round_up(divide_up(product.panels, wanted), kMinPanels);
    panel_blocks = divide_up(product.panels, panels_per_block);
}

size_t HeadsLinearOp::block_bytes() const {
    return product.takes_floats ? 0 : size_t(round_up(rows_per_block * product.input_bytes, 64));
}

void HeadsLinearOp::run(int, int64_t chunk, int thread) const {
    // Neighbouring chunks share panels, so that the weights of one block are read from memory once.
    const int64_t first_row = chunk % row_blocks * rows_per_block, count = std::min(rows_per_block, rows - first_row);
    const int64_t first_panel = chunk / row_blocks % panel_blocks * panels_per_block,
                  end_panel = std::min(product.panels, first_panel + panels_per_block);
    const int64_t head = chunk / (row_blocks * panel_blocks);

    Product::Inputs inputs = {x.at(first_row, head), x.token_stride * int64_t(sizeof(float)), count};
    if (!product.takes_floats) {
        char* const own = workspace + size_t(thread) * block_bytes();
        for (int64_t row = 0; row < count; ++row)
            product.prepare_row(x.at(first_row + row, head), {}, nullptr, own + row * product.input_bytes);
        inputs = {own, product.input_bytes, count};
    }
    float* const sums =
        static_cast<float*>(thread_scratch(size_t(count * (end_panel - first_panel) * kPanelRows) * sizeof(float)));
    product.run(weights.of(head), inputs, first_panel, end_panel, sums,
                [&](int64_t first_column, int64_t columns, EpilogueArgs e) {
                    e.columns = columns;
                    e.out = out + (first_row * heads + head) * product.n_out + first_column;
                    e.out_stride = heads * product.n_out;
                    product.table->linear_epilogue(e);
                });
}

}  // namespace pace
