// Cuts the products of adapters into blocks of rows of one adapter x blocks of panels. The bits of a row depend only on
// the row and its own routing. Each product is a kernel of csrc/kernels, in which rows are independent.
#include "pace/adapter_ops.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/ops.h"

namespace pace {

namespace {

// Maximum rows of one adapter in one product: 512 rows of a prefill are enough blocks for the threads.
constexpr int64_t kMaxBlockRows = 64;

// Up to this many pairs every thread sorts for itself: about 10 ns a pair, while a barrier takes 200 ns or more.
constexpr int64_t kMaxPairsPerThread = 16;

// Panels of A in a chunk. Ranks of 8 to 32 are one or two panels, which AMX multiplies together.
constexpr int64_t kDownPanels = 2;

// Maximum panels of columns in a chunk, and the wanted number of chunks for each thread. Every chunk visits all blocks,
// so wide chunks are cheaper.
constexpr int64_t kMaxUpPanels = 32, kChunksPerThread = 4;

constexpr size_t in_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

bool rounds_inputs(const KernelTable& table, DType dtype) { return table.rounds_inputs && dtype == DType::BF16; }

// sums [rows][sums_stride] = x W' for panels [first, end) of W; `x_bytes` between rows of x.
void multiply(const KernelTable& table, const PackedHeader& w, const void* x, int64_t x_bytes, int64_t rows,
              int64_t first, int64_t end, float* sums, int64_t sums_stride) {
    LinearArgs a = {};
    a.x = x;
    a.x_stride = x_bytes / int64_t(rounds_inputs(table, w.dtype) ? sizeof(BF16) : sizeof(float));
    a.rows = rows;
    a.panels = w.panel(first);
    a.panel_count = end - first;
    a.k_padded = w.k_padded;
    a.sums = sums;
    a.sums_stride = sums_stride;
    table.linear[size_t(w.dtype)](a);
}

}  // namespace

void AddAdaptersOp::prepare(int thread_count) {
    const bool same = table == &kernels() && threads == thread_count;
    table = &kernels();
    threads = thread_count;
    if (!same) {  // reading the header of every adapter in every step would take longer than small products
        check_layouts();
        cut_columns();
    }
    pairs = routing ? rows * per_row : 0;
    ranks = round_up(adapters.parts * adapters.max_rank, kPanelRows);
    max_panels = ranks / kPanelRows;
    // Each adapter may have one last block that is not full, for every place in a routing.
    max_blocks = std::min(adapters.slots * per_row, pairs) + pairs / kMaxBlockRows;
    per_thread = pairs <= kMaxPairsPerThread;
    chunk_counts[kSort] = pairs > 0 && !per_thread ? 1 : 0;
    chunk_counts[kDown] = pairs > 0 ? max_blocks * divide_up(max_panels, kDownPanels) : 0;
    chunk_counts[kUp] = pairs > 0 ? int64_t(cuts.size()) : 0;
    sorted.assign(per_thread ? size_t(threads) : 0, false);
}

void AddAdaptersOp::check_layouts() const {
    const Layout layout = preferred_layout({.dtype = adapters.dtype});
    for (int64_t slot = 0; slot < adapters.slots; ++slot) {
        const PackedHeader* const a = adapters.a(slot);
        if (a && (a->layout != layout || a->dtype != adapters.dtype))
            throw std::invalid_argument(std::string("an adapter was loaded for another instruction set than ") +
                                        table->name + ", the one in use; load it again");
    }
}

void AddAdaptersOp::cut_columns() {
    cuts.clear();
    int64_t panels = 0;
    for (int64_t part = 0; part < adapters.parts; ++part)
        panels += divide_up(adapters.starts[part + 1] - adapters.starts[part], kPanelRows);
    const int64_t count = std::clamp<int64_t>(panels / (kChunksPerThread * threads), 1, kMaxUpPanels);
    for (int64_t part = 0; part < adapters.parts; ++part) {
        const int64_t end = divide_up(adapters.starts[part + 1] - adapters.starts[part], kPanelRows);
        for (int64_t first = 0; first < end; first += count)
            cuts.push_back({part, first, std::min(end, first + count)});
    }
}

// ---- Memory: t, then the copies

size_t AddAdaptersOp::copy_bytes() const {
    return in_lines(sizeof(int32_t)) + in_lines(size_t(max_blocks) * sizeof(Block)) +
           in_lines(size_t(pairs) * sizeof(int32_t)) + in_lines(size_t(pairs) * sizeof(float));
}

size_t AddAdaptersOp::workspace_bytes() const {
    if (pairs == 0) return 0;
    return size_t(pairs * ranks) * sizeof(float) + size_t(per_thread ? threads : 1) * copy_bytes();
}

void AddAdaptersOp::set_workspace(void* memory) {
    workspace = static_cast<char*>(memory);
    sorted.assign(sorted.size(), false);
}

AddAdaptersOp::Copy AddAdaptersOp::copy_of(int thread) const {
    char* next = workspace + size_t(pairs * ranks) * sizeof(float) + (per_thread ? size_t(thread) * copy_bytes() : 0);
    const auto take = [&next](size_t bytes) {
        char* const taken = next;
        next += in_lines(bytes);
        return taken;
    };
    Copy copy;
    copy.block_count = reinterpret_cast<int32_t*>(take(sizeof(int32_t)));
    copy.blocks = reinterpret_cast<Block*>(take(size_t(max_blocks) * sizeof(Block)));
    copy.row_of = reinterpret_cast<int32_t*>(take(size_t(pairs) * sizeof(int32_t)));
    copy.weight = reinterpret_cast<float*>(take(size_t(pairs) * sizeof(float)));
    return copy;
}

// The sorted pairs that this thread reads.
AddAdaptersOp::Copy AddAdaptersOp::ready(int thread) const {
    const Copy copy = copy_of(thread);
    if (per_thread && !sorted[size_t(thread)]) {
        sort(copy);
        sorted[size_t(thread)] = true;
    }
    return copy;
}

// ---- Phases

void AddAdaptersOp::run(int phase, int64_t chunk, int thread) const {
    if (phase == kSort) return sort(copy_of(thread));
    const Copy copy = ready(thread);
    if (phase == kUp) {
        for (int32_t b = 0; b < *copy.block_count; ++b) multiply_up(copy, copy.blocks[b], cuts[size_t(chunk)]);
        return;
    }
    const int64_t groups = divide_up(max_panels, kDownPanels), block = chunk / groups;
    if (block >= *copy.block_count) return;
    const int64_t panels = adapters.a(copy.blocks[block].slot)->panels, first = chunk % groups * kDownPanels;
    if (first < panels) multiply_down(copy, copy.blocks[block], first, std::min(panels, first + kDownPanels));
}

// Counts the pairs of each place in the routing and each adapter, then places them: rows ascending. A slot that does
// not exist, or whose adapter leaves this product alone, has no pairs.
void AddAdaptersOp::sort(const Copy& copy) const {
    const int64_t keys = per_row * adapters.slots;
    int32_t* const next = static_cast<int32_t*>(thread_scratch(size_t(keys) * sizeof(int32_t)));
    std::fill_n(next, keys, 0);
    const auto each_pair = [&](const auto& found) {
        for (int64_t row = 0; row < rows; ++row) {
            const float* const own = routing + (indices ? indices[row] : row) * 2 * per_row;
            for (int64_t i = 0; i < per_row; ++i) {
                if (!(own[i] >= 0 && own[i] < float(adapters.slots))) continue;  // NaN, too
                const int64_t slot = int64_t(own[i]);
                if (adapters.a(slot)) found(i * adapters.slots + slot, row, own[per_row + i]);
            }
        }
    };
    each_pair([&](int64_t key, int64_t, float) { next[key] += 1; });
    int32_t placed = 0, blocks = 0;
    for (int64_t key = 0; key < keys; ++key) {
        const int32_t end = placed + next[key];
        next[key] = placed;
        for (; placed < end; placed = copy.blocks[blocks - 1].first + copy.blocks[blocks - 1].count)
            copy.blocks[blocks++] = {int32_t(key % adapters.slots), placed,
                                     std::min<int32_t>(kMaxBlockRows, end - placed)};
    }
    *copy.block_count = blocks;
    each_pair([&](int64_t key, int64_t row, float weight) {
        const int32_t place = next[key]++;
        copy.row_of[place] = int32_t(row);
        copy.weight[place] = weight;
    });
}

// Computes columns of t for a block. Its inputs are gathered first, unless it is one row that is used as it is.
void AddAdaptersOp::multiply_down(const Copy& copy, const Block& block, int64_t first_panel, int64_t end_panel) const {
    const PackedHeader& a = *adapters.a(block.slot);
    const bool rounds = rounds_inputs(*table, a.dtype), gathers = rounds || norm || block.count > 1;
    const int64_t k = adapters.k, bytes = rounds ? a.k_padded * int64_t(sizeof(BF16)) : k * int64_t(sizeof(float));
    const size_t gathered = gathers ? in_lines(size_t(block.count * bytes)) : 0;
    char* const inputs = static_cast<char*>(thread_scratch(gathered + size_t(k) * sizeof(float)));
    float* const normalised = reinterpret_cast<float*>(inputs + gathered);
    for (int32_t i = 0; gathers && i < block.count; ++i) {
        const float* row = x + copy.row_of[block.first + i] * x_stride;
        char* const place = inputs + i * bytes;
        if (norm) {
            const auto normalise = norm.kind == Norm::Kind::Layer ? table->layer_norm : table->rms_norm;
            normalise({row, norm.weight, norm.bias, normalised}, k, norm.eps);
            row = normalised;
        }
        if (rounds)
            table->round_to_bf16(row, reinterpret_cast<BF16*>(place), k, a.k_padded);
        else
            std::memcpy(place, row, size_t(bytes));
    }
    const void* const rows_of_block =
        gathers ? static_cast<const void*>(inputs) : x + copy.row_of[block.first] * x_stride;
    multiply(*table, a, rows_of_block, bytes, block.count, first_panel, end_panel,
             sums_of(block.first) + first_panel * kPanelRows, ranks);
}

// Adds a block's products to some columns of a part of y.
void AddAdaptersOp::multiply_up(const Copy& copy, const Block& block, const Cut& cut) const {
    const PackedHeader* const b = adapters.b(block.slot, cut.part);
    if (!b) return;
    int64_t rank = 0;  // of the parts before this one
    for (int64_t part = 0; part < cut.part; ++part) {
        if (const PackedHeader* const other = adapters.b(block.slot, part)) rank += other->k;
    }
    const float* const t = sums_of(block.first) + rank;
    const bool rounds = rounds_inputs(*table, b->dtype);
    const int64_t row_sums = (cut.end_panel - cut.first_panel) * kPanelRows;
    const int64_t bytes = rounds ? b->k_padded * int64_t(sizeof(BF16)) : ranks * int64_t(sizeof(float));
    const size_t rounded = rounds ? in_lines(size_t(block.count * bytes)) : 0;
    char* const scratch = static_cast<char*>(thread_scratch(rounded + size_t(block.count * row_sums) * sizeof(float)));
    float* const sums = reinterpret_cast<float*>(scratch + rounded);
    for (int32_t i = 0; rounds && i < block.count; ++i)
        table->round_to_bf16(t + i * ranks, reinterpret_cast<BF16*>(scratch + i * bytes), b->k, b->k_padded);
    multiply(*table, *b, rounds ? static_cast<const void*>(scratch) : t, bytes, block.count, cut.first_panel,
             cut.end_panel, sums, row_sums);

    const int64_t column = cut.first_panel * kPanelRows;
    const float* const bias = adapters.bias(block.slot, cut.part);
    EpilogueArgs e = {};
    e.panel_stride = kPanelRows;
    e.rows = 1;
    e.columns = std::min(row_sums, b->n - column);
    e.bias = bias ? bias + column : nullptr;
    for (int32_t i = 0; i < block.count; ++i) {
        e.sums = sums + i * row_sums;
        e.scale = copy.weight[block.first + i] * adapters.scale(block.slot, cut.part);
        e.out = y + copy.row_of[block.first + i] * y_stride + adapters.starts[cut.part] + column;
        e.residual = e.out;
        table->linear_epilogue(e);
    }
}

}  // namespace pace
