// Cuts a matrix product into blocks of rows x blocks of panels. The weights of a block stay in cache over its rows.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

#include "pace/adapter_ops.h"
#include "pace/largest.h"
#include "pace/ops.h"

namespace pace {

namespace {

// Maximum rows of a block. The inputs of a block (128 x the kernel's K block of at most 512 fp32) are 256 KB, half of a
// small second-level cache. More rows would read the weights less often, but 128 already do 64 multiply-adds per byte
// of weight.
constexpr int64_t kMaxBlockRows = 128;

// Panels of a block with many rows. Its sums (128 rows x 8 panels x 16 x 4 bytes = 64 KB) stay in the second-level
// cache.
constexpr int64_t kGemmPanels = 8;

// Panels of a memory-bound block with few rows. Each block of a thread takes a quarter of the rest of its share. Long
// blocks read without interruption, and short ones at the end keep threads from waiting for each other. A block has at
// least the four panels of a tile, except a thread's last; an upper limit keeps its sums small. With 12 equal blocks a
// thread, a decode step took 1.03 times as long (0.5B, avx2, 2 threads, median of 40 pairs).
constexpr int64_t kMinPanels = 4, kMaxPanels = 64, kShareOfRest = 4;

// A thread's share is a multiple of this: gate and up have a panel each.
constexpr int64_t kShareStep = 2;
constexpr int64_t kFewRows = 16;

// Up to this many rows, every thread prepares its inputs for itself instead of waiting for a separate phase. A norm of
// K elements takes about K / 8 ns, a barrier 200 ns or more.
constexpr int64_t kMaxRowsPerThread = 4;

// Fetched ahead at the start of a thread's share: as far ahead as most kernels fetch while they read.
constexpr int64_t kFetchedBytes = 4096;

// Elements in a chunk that prepares inputs: about 4 us of work.
constexpr int64_t kInputElements = 16 * 1024;

// Panels in a thread's share if there are few rows.
int64_t panels_per_thread(int64_t panels, int threads) { return round_up(divide_up(panels, threads), kShareStep); }

}  // namespace

std::pair<int64_t, int64_t> panels_of_thread(int64_t panels, int thread, int threads) {
    const int64_t share = panels_per_thread(panels, threads);
    return {std::min(panels, thread * share), std::min(panels, (thread + 1) * share)};
}

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
    product.describe(weight, order != nullptr);
    if (apart && !product.glu) throw std::invalid_argument("only a weight of gate and up gives them apart");
    row_blocks = std::max<int64_t>(1, divide_up(rows, kMaxBlockRows));
    rows_per_block = divide_up(divide_up(rows, row_blocks), product.table->tile_rows) * product.table->tile_rows;
    row_blocks = divide_up(rows, std::max<int64_t>(1, rows_per_block));
    cut_panels(threads);

    const bool as_they_are = product.takes_floats && !order && !norm;
    inputs = as_they_are ? Inputs::Plain : rows > kMaxRowsPerThread ? Inputs::Shared : Inputs::PerThread;
    rows_per_input_chunk = std::max<int64_t>(1, kInputElements / std::max<int64_t>(1, product.k));
    input_chunks = inputs == Inputs::Shared ? divide_up(rows, rows_per_input_chunk) : 0;
    prepared.assign(inputs == Inputs::PerThread ? threads : 0,
                    false);  // also reset by set_workspace(), before every run
}

// Sets the starts of blocks of panels, and the end of the last one. With few rows every thread gets the same number of
// blocks, so that the pool assigns it its own share. Blocks past the end are empty.
void LinearOp::cut_panels(int threads) {
    block_starts.assign(1, 0);
    first_weights.clear();
    const auto append = [this](int64_t count) {
        block_starts.push_back(std::min(product.panels, block_starts.back() + count));
    };
    if (rows > kFewRows) {
        while (block_starts.back() < product.panels) append(kGemmPanels);
        return;
    }
    const int64_t share = panels_per_thread(product.panels, threads);
    for (int thread = 0; thread < threads; ++thread) {
        const int64_t first = block_starts.back();
        first_weights.push_back(first < product.panels ? product.panel(weight, first) : nullptr);
        for (int64_t rest = share; rest > 0;) {
            const int64_t some = std::clamp(rest / kShareOfRest / kMinPanels * kMinPanels, kMinPanels, kMaxPanels);
            const int64_t count = std::min(rest, some);
            append(count);
            rest -= count;
        }
    }
}

// Size of one copy of the prepared inputs, in whole cache lines so that threads share none.
size_t LinearOp::copy_bytes() const { return size_t(round_up(rows * product.input_bytes, 64)); }

size_t LinearOp::workspace_bytes() const {
    return inputs == Inputs::Plain ? 0 : copy_bytes() * std::max<size_t>(1, prepared.size());
}

// Prepares rows [first_row, end_row) of x in their places in `copy`.
void LinearOp::prepare_inputs(int64_t first_row, int64_t end_row, char* copy) const {
    for (int64_t row = first_row; row < end_row; ++row)
        product.prepare_row(x + row * x_stride, norm, order, copy + row * product.input_bytes);
}

void LinearOp::fetch(int phase, int thread) const {
    if (phase == 0 || first_weights.empty()) return;
    const auto fetch = [](const void* memory, int64_t bytes) {
        for (int64_t line = 0; memory && line < bytes; line += 64)
            __builtin_prefetch(static_cast<const char*>(memory) + line);
    };
    product.fetch_header(weight);
    fetch(block_starts.data(), 64);
    if (norm) fetch(norm.weight, std::min(kFetchedBytes, product.k * int64_t(sizeof(float))));
    fetch(first_weights[size_t(thread)], kFetchedBytes);
}

// The complete copy of inputs that this thread reads.
const char* LinearOp::prepared_inputs(int thread) const {
    if (inputs == Inputs::Shared) return workspace;
    char* const copy = workspace + thread * copy_bytes();
    if (!prepared[thread]) {
        prepare_inputs(0, rows, copy);
        prepared[thread] = true;
    }
    return copy;
}

void LinearOp::run(int phase, int64_t chunk, int thread) const {
    if (phase == 0) {
        const int64_t first_row = chunk * rows_per_input_chunk;
        return prepare_inputs(first_row, std::min(rows, first_row + rows_per_input_chunk), workspace);
    }
    // Neighbouring chunks share panels, so that the weights of one block are read from memory once.
    const int64_t first_row = chunk % row_blocks * rows_per_block;
    const int64_t count = std::min(rows_per_block, rows - first_row);
    const int64_t first_panel = block_starts[chunk / row_blocks], end_panel = block_starts[chunk / row_blocks + 1];
    if (first_panel == end_panel) return;

    const bool plain = inputs == Inputs::Plain;
    const int64_t stride = plain ? x_stride * int64_t(sizeof(float)) : product.input_bytes;
    const char* const first =
        plain ? reinterpret_cast<const char*>(x) : prepared_inputs(thread);    // also uses the scratch
    const bool adapted = adapters && adapters->any(thread, first_row, count);  // also uses the scratch
    const int64_t width = (end_panel - first_panel) * kPanelRows;
    const size_t sums_bytes = size_t(count * width) * sizeof(float);
    // With adapters, gate and up are copied before they are added to.
    const size_t bytes = adapted ? 2 * sums_bytes + adapters->add_bytes(count, width) : sums_bytes;
    char* const scratch = static_cast<char*>(thread_scratch(bytes));
    product.run(weight, {first + first_row * stride, stride, count}, first_panel, end_panel,
                reinterpret_cast<float*>(scratch), [&](int64_t first_column, int64_t columns, const EpilogueArgs& e) {
                    if (adapted)
                        finish_with_adapters(first_row, first_column, columns, e, thread, scratch + sums_bytes);
                    else
                        finish(first_row, first_column, columns, e);
                    if (largest && rows <= kFewRows) find_largest(first_row, count, first_column, columns);
                });
}

// Reads what finish() has just written: reading all logits at the end would take them from memory.
void LinearOp::find_largest(int64_t first_row, int64_t count, int64_t first_column, int64_t columns) const {
    for (int64_t row = first_row; row < first_row + count; ++row) {
        const float* const y = out + row * product.n_out + first_column;
        const int64_t found = product.table->argmax(y, columns);
        raise_candidate(largest[row], found < 0 ? candidate_of(NAN, 0) : candidate_of(y[found], first_column + found));
    }
}

// Writes columns [first_column, first_column + columns) of out from e's sums.
void LinearOp::finish(int64_t first_row, int64_t first_column, int64_t columns, EpilogueArgs e) const {
    const int64_t up = product.n_out, n = apart ? 2 * up : up;
    e.columns = columns;
    e.activation = activation;
    e.residual_stride = e.out_stride = n;
    const auto write = [&](int64_t column) {
        const int64_t at = first_row * n + column;
        e.bias = bias ? bias + column : nullptr;
        e.up_bias = bias ? bias + up + column : nullptr;
        e.residual = residual ? residual + at : nullptr;
        e.out = out + at;
        product.table->linear_epilogue(e);
    };
    if (apart) e.glu = false;
    write(first_column);
    if (apart) {
        e.sums += e.up_offset;
        write(up + first_column);
    }
}

// The same bits as a product with apart, what adapters add to it, and the activation of its gate.
void LinearOp::finish_with_adapters(int64_t first_row, int64_t first_column, int64_t columns, EpilogueArgs e,
                                    int thread, char* scratch) const {
    const int64_t up = product.n_out;
    if (!product.glu || apart) {
        const int64_t n = apart ? 2 * up : up;
        finish(first_row, first_column, columns, e);
        float* const y = out + first_row * n;
        for (const int64_t column : {first_column, up + first_column}) {
            if (column == first_column || apart)
                adapters->add(thread, first_row, e.rows, column, columns, y + column, n, scratch);
        }
        return;
    }
    const int64_t stride = round_up(columns, kPanelRows);
    float* const copies[2] = {reinterpret_cast<float*>(scratch), reinterpret_cast<float*>(scratch) + e.rows * stride};
    void* const rest = scratch + 2 * size_t(e.rows * stride) * sizeof(float);
    for (int64_t half = 0; half < 2; ++half) {
        const int64_t column = half * up + first_column;
        EpilogueArgs copy = e;
        copy.sums += half * e.up_offset;
        copy.glu = false;
        copy.columns = columns;
        copy.bias = bias ? bias + column : nullptr;
        copy.out = copies[half];
        copy.out_stride = stride;
        product.table->linear_epilogue(copy);
        adapters->add(thread, first_row, e.rows, column, columns, copies[half], stride, rest);
    }
    e.sums = copies[0];
    e.sums_stride = stride;
    e.panel_stride = kPanelRows;
    e.up_offset = copies[1] - copies[0];
    e.columns = columns;
    e.activation = activation;
    e.out = out + first_row * up + first_column;
    e.out_stride = up;
    product.table->linear_epilogue(e);
}

}  // namespace pace
