// How a matrix product is cut: blocks of rows x blocks of panels, the weights of a block staying in cache over its
// rows.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "pace/ops.h"

namespace pace {

namespace {

// Rows of a block. Inputs of a block (128 x K-block of the kernel, at most 512 fp32) are 256 KB: half of a small
// second-level cache. More rows would read the weights less often, but 128 already do 64 multiply-adds per byte of
// them.
constexpr int64_t kMaxBlockRows = 128;

// Panels of a block with many rows: its sums (128 rows x 8 panels x 16 x 4 bytes = 64 KB) stay in the second-level
// cache.
constexpr int64_t kGemmPanels = 8;

// Panels of a block with few rows, bound by memory. A thread's blocks take a quarter each of what is left of its share:
// long ones read on undisturbed, and short ones at the end leave no thread waiting for another's last. At least the
// four panels that a tile takes, at most what keeps sums small. With 12 equal blocks a thread, a decode step took 1.03
// times as long (0.5B, avx2, 2 threads, median of 40 pairs).
constexpr int64_t kMinPanels = 4, kMaxPanels = 64, kShareOfRest = 4;
constexpr int64_t kFewRows = 16;

// Up to this many rows, every thread prepares its inputs itself instead of waiting for a phase of their own: a norm of
// K elements takes some K / 8 ns, a barrier 200 ns or more.
constexpr int64_t kMaxRowsPerThread = 4;

// Elements of a chunk that prepares inputs: some 4 us of work.
constexpr int64_t kInputElements = 16 * 1024;

// Panels of a thread's share where there are few rows.
int64_t panels_per_thread(int64_t panels, int threads) {
    return divide_up(divide_up(panels, threads), kMinPanels) * kMinPanels;
}

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
    const PackedHeader& h = packed_header(weight);
    table = &kernels();
    k = h.k;
    glu = h.glu;
    n_out = glu ? h.n / 2 : h.n;
    panels = h.panels;
    input_bytes = 0;
    parts.clear();
    kinds.clear();
    for (int i = 0; i < h.parts(); ++i) add_part(h.part(i));

    row_blocks = std::max<int64_t>(1, divide_up(rows, kMaxBlockRows));
    rows_per_block = divide_up(divide_up(rows, row_blocks), table->tile_rows) * table->tile_rows;
    row_blocks = divide_up(rows, std::max<int64_t>(1, rows_per_block));
    cut_panels(threads);

    const bool as_they_are = kinds.size() == 1 && !kinds[0].rounds && !kinds[0].quantizes && !order && !norm;
    inputs = as_they_are ? Inputs::Plain : rows > kMaxRowsPerThread ? Inputs::Shared : Inputs::PerThread;
    rows_per_input_chunk = std::max<int64_t>(1, kInputElements / std::max<int64_t>(1, k));
    input_chunks = inputs == Inputs::Shared ? divide_up(rows, rows_per_input_chunk) : 0;
    prepared.assign(inputs == Inputs::PerThread ? threads : 0,
                    false);  // and again by set_workspace(), before every run
}

bool LinearOp::InputKind::serves(const PackedHeader& other) const {
    if (quantizes)
        return header->layout == other.layout && header->offset == other.offset && header->k_padded == other.k_padded &&
               header->input_group() == other.input_group() && header->has_even_levels() == other.has_even_levels();
    return header->dtype == other.dtype && header->k_padded == other.k_padded &&
           (!other.quantized() || other.layout == Layout::PanelF8);
}

void LinearOp::add_part(const PackedHeader& part) {
    if (!part.quantized() && part.layout != preferred_layout({.dtype = part.dtype}))
        throw std::invalid_argument(std::string("this weight was packed for another instruction set than ") +
                                    table->name +
                                    ", the one in use; pack it again, or select the instruction set before loading");
    if (order && !part.quantized()) throw std::invalid_argument("only quantised weights have an order of columns");
    const auto found =
        std::find_if(kinds.begin(), kinds.end(), [&](const InputKind& kind) { return kind.serves(part); });
    const int input = int(found - kinds.begin());
    if (found == kinds.end()) {
        const bool rounds = table->rounds_inputs && part.dtype == DType::BF16;
        const bool quantizes = part.quantized() && part.layout != Layout::PanelF8;
        kinds.push_back({&part, rounds, quantizes, input_bytes});
        input_bytes +=
            quantizes ? QuantizedInput::bytes(part) : part.k_padded * int64_t(rounds ? sizeof(BF16) : sizeof(float));
    }
    const bool first = parts.empty();
    parts.push_back({&part, first ? 0 : parts.back().first_panel + parts.back().header->panels,
                     first ? 0 : parts.back().first_row + parts.back().header->n, input});
}

// Where blocks of panels begin, and where the last one ends. Few rows: as many blocks for each thread, so that the pool
// deals it its share; those past the end are empty.
void LinearOp::cut_panels(int threads) {
    block_starts.assign(1, 0);
    const auto append = [this](int64_t count) {
        block_starts.push_back(std::min(panels, block_starts.back() + count));
    };
    if (rows > kFewRows) {
        while (block_starts.back() < panels) append(kGemmPanels);
        return;
    }
    const int64_t share = panels_per_thread(panels, threads);
    for (int thread = 0; thread < threads; ++thread) {
        for (int64_t rest = share; rest > 0;) {
            const int64_t count = std::clamp(rest / kShareOfRest / kMinPanels * kMinPanels, kMinPanels, kMaxPanels);
            append(count);
            rest -= count;
        }
    }
}

// One copy of the prepared inputs, in whole cache lines so that threads do not share any.
size_t LinearOp::copy_bytes() const { return size_t(round_up(rows * input_bytes, 64)); }

size_t LinearOp::workspace_bytes() const {
    return inputs == Inputs::Plain ? 0 : copy_bytes() * std::max<size_t>(1, prepared.size());
}

// Rows [first_row, end_row) of x, normalised, in the order of the weight's columns, and of each kind, to their places in
// `copy`.
void LinearOp::prepare_inputs(int64_t first_row, int64_t end_row, char* copy) const {
    const auto normalise = norm.kind == Norm::Kind::Layer ? table->layer_norm : table->rms_norm;
    for (int64_t row = first_row; row < end_row; ++row) {
        const float* source = x + row * x_stride;
        char* const out = copy + row * input_bytes;
        float* const scratch = static_cast<float*>(thread_scratch(size_t(2 * k) * sizeof(float)));
        if (norm) {
            normalise({source, norm.weight, norm.bias, scratch}, k, norm.eps);
            source = scratch;
        }
        if (order) {
            for (int64_t j = 0; j < k; ++j) scratch[k + j] = source[order[j]];
            source = scratch + k;
        }
        for (const InputKind& kind : kinds) {
            char* const place = out + kind.offset;
            if (kind.quantizes) {
                table->quantize_input(source, *kind.header, place);
            } else if (kind.rounds) {
                table->round_to_bf16(source, reinterpret_cast<BF16*>(place), k, kind.header->k_padded);
            } else {
                std::memcpy(place, source, size_t(k) * sizeof(float));
            }
        }
    }
}

// The copy that this thread reads, complete.
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
    const Rows block = {first_row, std::min(rows_per_block, rows - first_row)};
    const int64_t first_panel = block_starts[chunk / row_blocks], end_panel = block_starts[chunk / row_blocks + 1];
    if (first_panel == end_panel) return;

    const char* const prepared = inputs == Inputs::Plain ? nullptr : prepared_inputs(thread);  // uses the scratch too
    const int64_t stride = (end_panel - first_panel) * kPanelRows;
    float* const sums = static_cast<float*>(thread_scratch(size_t(block.count) * stride * sizeof(float)));
    EpilogueArgs e = {};
    e.sums = sums;
    e.sums_stride = stride;
    if (glu) {  // panels of gate and up: in turns where they are one part, else those of each lie together
        const int64_t first_column = first_panel / 2 * kPanelRows;
        const bool in_turns = parts.size() == 1;
        e.panel_stride = in_turns ? 2 * kPanelRows : kPanelRows;
        e.up_offset = in_turns ? kPanelRows : stride / 2;
        if (in_turns) {
            multiply(parts[0], block, first_panel, end_panel - first_panel, prepared, sums, stride);
        } else {
            for (size_t half = 0; half < 2; ++half)
                multiply(parts[half], block, first_panel / 2, (end_panel - first_panel) / 2, prepared,
                         sums + half * stride / 2, stride);
        }
        return finish(block, first_column, std::min(stride / 2, n_out - first_column), e);
    }
    e.panel_stride = kPanelRows;
    for (const Part& part : parts) {
        const int64_t first = std::max<int64_t>(0, first_panel - part.first_panel),
                      end = std::min(part.header->panels, end_panel - part.first_panel);
        if (first >= end) continue;
        multiply(part, block, first, end - first, prepared, sums, stride);
        finish(block, part.first_row + first * kPanelRows,
               std::min((end - first) * kPanelRows, part.header->n - first * kPanelRows), e);
    }
}

// Sums of a part's panels [first_panel, first_panel + panel_count).
void LinearOp::multiply(const Part& part, Rows block, int64_t first_panel, int64_t panel_count, const char* prepared,
                        float* sums, int64_t sums_stride) const {
    const PackedHeader& h = *part.header;
    const InputKind& kind = kinds[size_t(part.input)];
    const bool plain = inputs == Inputs::Plain;
    const void* const multiplied = plain ? static_cast<const void*>(x + block.first * x_stride)
                                         : prepared + block.first * input_bytes + kind.offset;
    const int64_t stride = plain ? x_stride * int64_t(sizeof(float)) : input_bytes;  // in bytes
    if (h.quantized())
        return table->linear_quantized(
            {multiplied, stride, block.count, &h, first_panel, panel_count, sums, sums_stride});
    LinearArgs a = {};
    a.x = multiplied;
    a.x_stride = stride / int64_t(kind.rounds ? sizeof(BF16) : sizeof(float));
    a.rows = block.count;
    a.panels = h.panel(first_panel);
    a.panel_count = panel_count;
    a.k_padded = h.k_padded;
    a.sums = sums;
    a.sums_stride = sums_stride;
    table->linear[size_t(h.dtype)](a);
}

// Columns [first_column, first_column + columns) of out, from e's sums.
void LinearOp::finish(Rows block, int64_t first_column, int64_t columns, EpilogueArgs e) const {
    const int64_t at = block.first * n_out + first_column;
    e.rows = block.count;
    e.columns = columns;
    e.glu = glu;
    e.activation = activation;
    e.bias = bias ? bias + first_column : nullptr;
    e.up_bias = bias ? bias + n_out + first_column : nullptr;
    e.residual = residual ? residual + at : nullptr;
    e.residual_stride = n_out;
    e.out = out + at;
    e.out_stride = n_out;
    table->linear_epilogue(e);
}

}  // namespace pace
