// Cuts the products of adapters into blocks of rows of one adapter x blocks of panels. The bits of a row depend only on
// the row and its own routing. Each product is a kernel of csrc/kernels, in which rows and columns are independent.
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

// ---- Preparation

void AdapterProducts::prepare(int thread_count) {
    const bool same = table == &kernels() && threads == thread_count;
    table = &kernels();
    threads = thread_count;
    if (!same) check_layouts();  // reading the header of every adapter in every step would take longer than products
    pairs = routing ? rows * per_row : 0;
    ranks = round_up(adapters.parts * adapters.max_rank, kPanelRows);
    max_panels = ranks / kPanelRows;
    // Each adapter may have one last block that is not full, for every place in a routing.
    max_blocks = std::min(adapters.slots * per_row, pairs) + pairs / kMaxBlockRows;
    per_thread = pairs <= kMaxPairsPerThread;
    sorted.assign(per_thread ? size_t(threads) : 0, false);
}

void AdapterProducts::check_layouts() const {
    const Layout layout = preferred_layout({.dtype = adapters.dtype});
    for (int64_t slot = 0; slot < adapters.slots; ++slot) {
        const PackedHeader* const a = adapters.a(slot);
        if (a && (a->layout != layout || a->dtype != adapters.dtype))
            throw std::invalid_argument(std::string("an adapter was loaded for another instruction set than ") +
                                        table->name + ", the one in use; load it again");
    }
}

// ---- Memory: a shared t, then the copies, each with a t of its own if there is no shared one

size_t AdapterProducts::t_bytes() const { return size_t(pairs * ranks) * sizeof(float); }

size_t AdapterProducts::copy_bytes() const {
    return (alone() ? t_bytes() : 0) + in_lines(sizeof(int32_t)) + in_lines(size_t(max_blocks) * sizeof(Block)) +
           in_lines(size_t(pairs) * sizeof(int32_t)) + in_lines(size_t(pairs) * sizeof(float));
}

size_t AdapterProducts::workspace_bytes() const {
    if (pairs == 0) return 0;
    return (alone() ? 0 : t_bytes()) + size_t(per_thread ? threads : 1) * copy_bytes();
}

void AdapterProducts::set_workspace(void* memory) {
    workspace = static_cast<char*>(memory);
    sorted.assign(sorted.size(), false);
}

AdapterProducts::Copy AdapterProducts::copy_of(int thread) const {
    char* next = workspace + (alone() ? 0 : t_bytes()) + (per_thread ? size_t(thread) * copy_bytes() : 0);
    const auto take = [&next](size_t bytes) {
        char* const taken = next;
        next += in_lines(bytes);
        return taken;
    };
    Copy copy;
    copy.t = reinterpret_cast<float*>(alone() ? take(t_bytes()) : workspace);
    copy.block_count = reinterpret_cast<int32_t*>(take(sizeof(int32_t)));
    copy.blocks = reinterpret_cast<Block*>(take(size_t(max_blocks) * sizeof(Block)));
    copy.row_of = reinterpret_cast<int32_t*>(take(size_t(pairs) * sizeof(int32_t)));
    copy.weight = reinterpret_cast<float*>(take(size_t(pairs) * sizeof(float)));
    return copy;
}

// The sorted pairs that this thread reads.
AdapterProducts::Copy AdapterProducts::ready(int thread) const {
    const Copy copy = copy_of(thread);
    if (per_thread && !sorted[size_t(thread)]) {
        sort(copy);
        if (alone() && *copy.block_count > 0)
            multiply_down(copy, copy.blocks[0], 0, adapters.a(copy.blocks[0].slot)->panels);
        sorted[size_t(thread)] = true;
    }
    return copy;
}

// ---- Sorting

// Counts the pairs of each place in the routing and each adapter, then places them: rows ascending. A slot that does
// not exist, or whose adapter leaves this product alone, has no pairs.
void AdapterProducts::sort(const Copy& copy) const {
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

// The pairs of a block whose rows are in [first_row, end_row).
AdapterProducts::Pairs AdapterProducts::pairs_of(const Copy& copy, const Block& block, int64_t first_row,
                                                 int64_t end_row) {
    const int32_t *const begin = copy.row_of + block.first, *const end = begin + block.count;
    const int32_t* const first = std::lower_bound(begin, end, first_row);
    return {int32_t(first - copy.row_of), int32_t(std::lower_bound(first, end, end_row) - copy.row_of)};
}

bool AdapterProducts::any(int thread, int64_t first_row, int64_t count) const {
    if (pairs == 0) return false;
    const Copy copy = ready(thread);
    return std::any_of(copy.blocks, copy.blocks + *copy.block_count, [&](const Block& block) {
        const Pairs found = pairs_of(copy, block, first_row, first_row + count);
        return found.first < found.end;
    });
}

// ---- A

int64_t AdapterProducts::down_chunks() const {
    return pairs > 0 && !alone() ? max_blocks * divide_up(max_panels, kDownPanels) : 0;
}

void AdapterProducts::down(int64_t chunk, int thread) const {
    const Copy copy = ready(thread);
    const int64_t groups = divide_up(max_panels, kDownPanels), block = chunk / groups;
    if (block >= *copy.block_count) return;
    const int64_t panels = adapters.a(copy.blocks[block].slot)->panels, first = chunk % groups * kDownPanels;
    if (first < panels) multiply_down(copy, copy.blocks[block], first, std::min(panels, first + kDownPanels));
}

// Computes columns of t for a block. Its inputs are gathered first, unless it is one row that is used as it is.
void AdapterProducts::multiply_down(const Copy& copy, const Block& block, int64_t first_panel,
                                    int64_t end_panel) const {
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
             copy.t + block.first * ranks + first_panel * kPanelRows, ranks);
}

// ---- B

// Rounded inputs of a block, and sums of the panels that cover some columns. They may begin inside a panel.
size_t AdapterProducts::add_bytes(int64_t count, int64_t columns) const {
    const int64_t pairs_of_block = std::min(count, kMaxBlockRows);
    const int64_t panels = divide_up(columns, kPanelRows) + 1;
    return in_lines(size_t(pairs_of_block * round_up(adapters.max_rank, kPairPadding)) * sizeof(BF16)) +
           size_t(pairs_of_block * panels * kPanelRows) * sizeof(float);
}

void AdapterProducts::add(int thread, int64_t first_row, int64_t count, int64_t first_column, int64_t columns, float* y,
                          int64_t y_stride, void* scratch) const {
    const Copy copy = ready(thread);
    for (int32_t b = 0; b < *copy.block_count; ++b) {
        const Pairs some = pairs_of(copy, copy.blocks[b], first_row, first_row + count);
        if (some.first == some.end) continue;
        for (int64_t part = 0; part < adapters.parts; ++part) {
            const int64_t start = adapters.starts[part];
            const Range range = {part, std::max(first_column, start) - start,
                                 std::min(first_column + columns, adapters.starts[part + 1]) - start};
            if (range.first < range.end)
                add_part(copy, copy.blocks[b].slot, some, range, first_row, y + start + range.first - first_column,
                         y_stride, static_cast<char*>(scratch));
        }
    }
}

// Adds some pairs' products to columns of a part; y is their first one in row `first_row`.
void AdapterProducts::add_part(const Copy& copy, int32_t slot, const Pairs& some, const Range& range, int64_t first_row,
                               float* y, int64_t y_stride, char* scratch) const {
    const PackedHeader* const b = adapters.b(slot, range.part);
    if (!b) return;
    int64_t rank = 0;  // of the parts before this one
    for (int64_t part = 0; part < range.part; ++part) {
        if (const PackedHeader* const other = adapters.b(slot, part)) rank += other->k;
    }
    const float* const t = copy.t + some.first * ranks + rank;
    const bool rounds = rounds_inputs(*table, b->dtype);
    const int64_t first_panel = range.first / kPanelRows, end_panel = divide_up(range.end, kPanelRows);
    const int64_t count = some.end - some.first, row_sums = (end_panel - first_panel) * kPanelRows;
    const int64_t bytes = rounds ? b->k_padded * int64_t(sizeof(BF16)) : ranks * int64_t(sizeof(float));
    const size_t rounded = rounds ? in_lines(size_t(count * bytes)) : 0;
    float* const sums = reinterpret_cast<float*>(scratch + rounded);
    for (int64_t i = 0; rounds && i < count; ++i)
        table->round_to_bf16(t + i * ranks, reinterpret_cast<BF16*>(scratch + i * bytes), b->k, b->k_padded);
    multiply(*table, *b, rounds ? static_cast<const void*>(scratch) : t, bytes, count, first_panel, end_panel, sums,
             row_sums);

    const float* const bias = adapters.bias(slot, range.part);
    EpilogueArgs e = {};
    e.sums_stride = row_sums;
    e.panel_stride = kPanelRows;
    e.columns = range.end - range.first;
    e.bias = bias ? bias + range.first : nullptr;
    e.residual_stride = e.out_stride = y_stride;
    const int32_t* const rows_of_pairs = copy.row_of + some.first;
    const float* const weights = copy.weight + some.first;
    for (int64_t i = 0; i < count; i += e.rows) {  // neighbouring rows of one weight together
        for (e.rows = 1; i + e.rows < count; ++e.rows) {
            const int64_t next = i + e.rows;
            if (rows_of_pairs[next] != rows_of_pairs[next - 1] + 1 || weights[next] != weights[i]) break;
        }
        e.sums = sums + i * row_sums + range.first - first_panel * kPanelRows;
        e.scale = weights[i] * adapters.scale(slot, range.part);
        e.out = y + (rows_of_pairs[i] - first_row) * y_stride;
        e.residual = e.out;
        table->linear_epilogue(e);
    }
}

// ---- AddAdaptersOp

void AddAdaptersOp::prepare(int thread_count) {
    AdapterProducts::prepare(thread_count);
    if (cut_for == thread_count) return;
    cut_for = thread_count;
    cuts.clear();
    int64_t panels = 0;
    for (int64_t part = 0; part < adapters.parts; ++part)
        panels += divide_up(adapters.starts[part + 1] - adapters.starts[part], kPanelRows);
    const int64_t columns = kPanelRows * std::clamp<int64_t>(panels / (kChunksPerThread * threads), 1, kMaxUpPanels);
    for (int64_t part = 0; part < adapters.parts; ++part) {
        const int64_t end = adapters.starts[part + 1];
        for (int64_t first = adapters.starts[part]; first < end; first += columns)
            cuts.push_back({first, std::min(columns, end - first)});
    }
}

void AddAdaptersOp::run(int phase, int64_t chunk, int thread) const {
    if (phase == kSort) return sort(thread);
    if (phase == kDown) return down(chunk, thread);
    make_ready(thread);
    const Cut& cut = cuts[size_t(chunk)];
    add(thread, 0, rows, cut.first, cut.count, y + cut.first, y_stride, thread_scratch(add_bytes(rows, cut.count)));
}

// ---- AdaptedLinearOp

void AdaptedLinearOp::prepare(int thread_count) {
    linear.adapters = &adapters;
    const Shape shape = {linear.rows, thread_count, &kernels(), linear.weight};
    if (shape != prepared) linear.prepare(thread_count);  // only the routing changes in every step
    prepared = shape;
    adapters.x = linear.x;
    adapters.x_stride = linear.x_stride;
    adapters.rows = linear.rows;
    adapters.norm = linear.norm;
    adapters.prepare(thread_count);
}

size_t AdaptedLinearOp::workspace_bytes() const {
    return in_lines(adapters.workspace_bytes()) + linear.workspace_bytes();
}

int64_t AdaptedLinearOp::chunks(int phase) const {
    switch (phase) {
        case kInputs:
            return linear.chunks(0) + (is_early() ? adapters.down_chunks() : adapters.sort_chunks());
        case kDown:
            return is_early() ? 0 : adapters.down_chunks();
        default:
            return linear.chunks(1);
    }
}

void AdaptedLinearOp::run(int phase, int64_t chunk, int thread) const {
    if (phase == kProduct) return linear.run(1, chunk, thread);
    if (phase == kDown) return adapters.down(chunk, thread);
    const int64_t of_inputs = linear.chunks(0);
    if (chunk < of_inputs) return linear.run(0, chunk, thread);
    is_early() ? adapters.down(chunk - of_inputs, thread) : adapters.sort(thread);
}

void AdaptedLinearOp::set_workspace(void* memory) {
    adapters.set_workspace(memory);
    linear.set_workspace(static_cast<char*>(memory) + in_lines(adapters.workspace_bytes()));
}

}  // namespace pace
