// Cuts the products of a mixture of experts into blocks of rows of one expert x blocks of panels. The bits of a row
// depend only on the row and its chosen experts. Each product is a kernel of csrc/kernels, in which rows are
// independent, and the outputs of experts are added in ascending order.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "pace/expert_ops.h"
#include "pace/ops.h"

namespace pace {

namespace {

// Maximum rows of one expert in one product; see kMaxBlockRows of ops/linear.cpp.
constexpr int64_t kMaxBlockRows = 128;

// Up to this many rows the op is memory-bound, and chunks are shares of the weights to read: see ops/linear.cpp.
constexpr int64_t kFewRows = 16;
constexpr int64_t kMaxRowsPerThread = 4;
// Maximum elements of hidden rows that every thread prepares for itself.
constexpr int64_t kMaxHiddenPerThread = 32 * 1024;

// Panels of a block with many rows. Its sums (rows x panels x 64 bytes) must stay in the second-level cache, and
// gathering the inputs should serve many panels.
constexpr int64_t kMinGemmPanels = 8, kMaxGemmPanels = 32, kGemmSums = 1024;

// Number of consecutive panels in a tile.
constexpr int64_t kTilePanels = 4;

// Pieces of a thread's share in the memory-bound case. Each is a quarter of the rest of the share.
constexpr int kPieces = 10;
constexpr double kShareOfRest = 0.25;

constexpr int64_t kInputElements = 16 * 1024;

// Number of pages in one request. The system silently truncates a longer request to its read-ahead size (128 KB by
// default).
constexpr int64_t kPageBytes = 4096, kAskedPages = 32;

// Asks the system to read the whole pages of [begin, begin + bytes) that are not resident, and returns at once.
// `mincore` is cheap; `madvise` on resident pages is not, so check first. For a file that this user neither owns nor
// may write, `mincore` reports every page as resident. Such pages are read on demand.
void ask_for(const void* begin, int64_t bytes) {
    char* const first = static_cast<char*>(const_cast<void*>(begin));
    const int64_t pages = bytes / kPageBytes;
    auto* const there = static_cast<unsigned char*>(thread_scratch(size_t(pages)));
    if (mincore(first, size_t(bytes), there)) return;
    for (int64_t page = 0; page < pages; page += kAskedPages) {
        const int64_t count = std::min(kAskedPages, pages - page);
        const auto missing = [](unsigned char flags) { return !(flags & 1); };
        if (std::any_of(there + page, there + page + count, missing))
            madvise(first + page * kPageBytes, size_t(count * kPageBytes), MADV_WILLNEED);
    }
}

int64_t rows_of_chunk(int64_t k) { return std::max<int64_t>(1, kInputElements / std::max<int64_t>(1, k)); }

// The start of each piece of all threads' shares, in 0..1.
std::vector<double> cut_shares(int threads) {
    std::vector<double> starts;
    for (int thread = 0; thread < threads; ++thread) {
        double rest = 1;
        for (int piece = 0; piece < kPieces; ++piece) {
            starts.push_back((thread + 1 - rest) / threads);
            rest *= 1 - kShareOfRest;
        }
    }
    starts.push_back(1);
    return starts;
}

int64_t scaled(double share, int64_t count) { return std::min(count, int64_t(std::llround(share * double(count)))); }

constexpr size_t in_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void ExpertsOp::prepare(int threads) {
    first.describe(gate_up.weights, false);
    second.describe(down.weights, false);
    if (second.glu || second.k != first.n_out)
        throw std::invalid_argument("experts are a stack of gate and up, and one of down that takes what they give");
    pairs = rows * router.top_k;
    few = rows <= kFewRows;
    const bool mapped = gate_up.mapped || down.mapped;
    per_thread = !mapped && rows <= kMaxRowsPerThread && pairs * second.k <= kMaxHiddenPerThread;
    copies = per_thread ? threads : 1;
    x_plain = first.takes_floats && !norm;
    plain = second.takes_floats;
    // Each expert may have one last block that is not full; experts without rows have no blocks.
    max_blocks = std::min(router.experts, pairs) + pairs / kMaxBlockRows;
    rows_per_chunk = rows_of_chunk(first.k);
    pairs_per_chunk = rows_of_chunk(second.k);
    const int64_t usual_rows = std::clamp<int64_t>(pairs / router.experts, 1, kMaxBlockRows);
    panels_per_block = std::clamp(kGemmSums / usual_rows / 8 * 8, kMinGemmPanels, kMaxGemmPanels);
    panel_blocks = divide_up(first.panels, panels_per_block);
    share_starts = cut_shares(threads);

    down_starts.assign(1, 0);
    const int64_t tiles = divide_up(second.panels, kTilePanels);
    if (few) {
        for (size_t i = 1; i < share_starts.size(); ++i)
            down_starts.push_back(std::min(second.panels, scaled(share_starts[i], tiles) * kTilePanels));
    } else {  // wide blocks reread hidden rows less often; enough of them keep all threads busy
        const int64_t panels = std::clamp<int64_t>(second.panels / (4 * threads), 1, kMinGemmPanels);
        while (down_starts.back() < second.panels)
            down_starts.push_back(std::min(second.panels, down_starts.back() + panels));
    }

    const bool shared = !per_thread && rows > 0;
    chunk_counts[kRoute] = shared ? divide_up(rows, rows_per_chunk) : 0;
    chunk_counts[kSort] = shared ? 1 : 0;
    chunk_counts[kUp] = rows == 0 ? 0 : few ? int64_t(share_starts.size()) - 1 : max_blocks * panel_blocks;
    chunk_counts[kHidden] = shared && !plain ? divide_up(pairs, pairs_per_chunk) : 0;
    chunk_counts[kDown] = rows == 0 ? 0 : int64_t(down_starts.size()) - 1;
    sorted.assign(per_thread ? size_t(threads) : 0, false);
    hidden_prepared = sorted;
}

// ---- Memory: hidden rows, then the copies

size_t ExpertsOp::copy_bytes() const {
    return in_lines(routing ? 0 : size_t(2 * pairs) * sizeof(float)) + in_lines(sizeof(int32_t)) +
           in_lines(size_t(max_blocks) * sizeof(Block)) + in_lines(size_t(pairs) * sizeof(int32_t)) +
           in_lines(size_t(pairs) * sizeof(float)) + in_lines(x_plain ? 0 : size_t(rows * first.input_bytes)) +
           in_lines(plain ? 0 : size_t(pairs * second.input_bytes));
}

size_t ExpertsOp::workspace_bytes() const {
    return in_lines(size_t(pairs * second.k) * sizeof(float)) + size_t(copies) * copy_bytes();
}

void ExpertsOp::set_workspace(void* memory) {
    workspace = static_cast<char*>(memory);
    hidden = reinterpret_cast<float*>(workspace);
    sorted.assign(sorted.size(), false);
    hidden_prepared.assign(hidden_prepared.size(), false);
}

ExpertsOp::Copy ExpertsOp::copy_of(int thread) const {
    char* next = workspace + in_lines(size_t(pairs * second.k) * sizeof(float)) +
                 (per_thread ? size_t(thread) * copy_bytes() : 0);
    const auto take = [&next](size_t bytes) {
        char* const taken = next;
        next += in_lines(bytes);
        return taken;
    };
    Copy copy;
    copy.routing = reinterpret_cast<float*>(take(routing ? 0 : size_t(2 * pairs) * sizeof(float)));
    copy.block_count = reinterpret_cast<int32_t*>(take(sizeof(int32_t)));
    copy.blocks = reinterpret_cast<Block*>(take(size_t(max_blocks) * sizeof(Block)));
    copy.row_of = reinterpret_cast<int32_t*>(take(size_t(pairs) * sizeof(int32_t)));
    copy.weight = reinterpret_cast<float*>(take(size_t(pairs) * sizeof(float)));
    copy.inputs = take(x_plain ? 0 : size_t(rows * first.input_bytes));
    copy.hidden = take(plain ? 0 : size_t(pairs * second.input_bytes));
    return copy;
}

ExpertsOp::Copy ExpertsOp::ready(int thread) const {
    const Copy copy = copy_of(thread);
    if (per_thread && !sorted[size_t(thread)]) {
        prepare_rows(copy, 0, rows);
        sort(copy);
        sorted[size_t(thread)] = true;
    }
    return copy;
}

// ---- Phases

void ExpertsOp::run(int phase, int64_t chunk, int thread) const {
    if (phase == kRoute) {
        const int64_t begin = chunk * rows_per_chunk;
        return prepare_rows(copy_of(thread), begin, std::min(rows, begin + rows_per_chunk));
    }
    if (phase == kSort) {
        sort(copy_of(thread));
        return read_ahead(copy_of(thread));
    }
    const Copy copy = ready(thread);
    if (phase == kUp && !few) {
        const int64_t block = chunk / panel_blocks, begin = chunk % panel_blocks * panels_per_block;
        if (block < *copy.block_count)
            multiply_up(copy, copy.blocks[block], begin, std::min(first.panels, begin + panels_per_block));
        return;
    }
    if (phase == kUp) {  // a share of the tiles of all blocks, numbered consecutively
        const int64_t tiles = divide_up(first.panels, kTilePanels), all = *copy.block_count * tiles;
        const int64_t end = scaled(share_starts[size_t(chunk) + 1], all);
        for (int64_t tile = scaled(share_starts[size_t(chunk)], all); tile < end;) {
            const int64_t block = tile / tiles, begin = tile % tiles, count = std::min(tiles - begin, end - tile);
            multiply_up(copy, copy.blocks[block], begin * kTilePanels,
                        std::min(first.panels, (begin + count) * kTilePanels));
            tile += count;
        }
        return;
    }
    if (phase == kHidden) {
        const int64_t begin = chunk * pairs_per_chunk;
        return prepare_hidden(copy, begin, std::min(pairs, begin + pairs_per_chunk));
    }
    if (per_thread && !plain && !hidden_prepared[size_t(thread)]) {
        prepare_hidden(copy, 0, pairs);
        hidden_prepared[size_t(thread)] = true;
    }
    multiply_down(copy, down_starts[size_t(chunk)], down_starts[size_t(chunk) + 1]);
}

void ExpertsOp::prepare_rows(const Copy& copy, int64_t begin, int64_t end) const {
    if (!routing) {
        void* const scratch = thread_scratch(router.scratch_bytes());
        for (int64_t row = begin; row < end; ++row)
            router.choose(*first.table, logits + row * router.experts, scratch, copy.routing + row * 2 * router.top_k);
    }
    if (x_plain) return;
    for (int64_t row = begin; row < end; ++row)
        first.prepare_row(x + row * x_stride, norm, nullptr, copy.inputs + row * first.input_bytes);
}

// Counts the pairs of each expert, then places them: rows ascending within an expert.
void ExpertsOp::sort(const Copy& copy) const {
    const int64_t k = router.top_k;
    const float* const chosen = routing ? routing : copy.routing;
    int32_t* const next = static_cast<int32_t*>(thread_scratch(size_t(router.experts) * sizeof(int32_t)));
    std::fill_n(next, router.experts, 0);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < k; ++i) next[int64_t(chosen[row * 2 * k + i])] += 1;
    }
    int32_t placed = 0, blocks = 0;
    for (int64_t e = 0; e < router.experts; ++e) {
        const int32_t end = placed + next[e];
        next[e] = placed;
        for (; placed < end; placed = copy.blocks[blocks - 1].first + copy.blocks[blocks - 1].count)
            copy.blocks[blocks++] = {int32_t(e), placed, std::min<int32_t>(kMaxBlockRows, end - placed)};
    }
    *copy.block_count = blocks;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < k; ++i) {
            const int32_t place = next[int64_t(chosen[row * 2 * k + i])]++;
            copy.row_of[place] = int32_t(row);
            copy.weight[place] = chosen[row * 2 * k + k + i];
        }
    }
}

// Asks for the experts' pages in the order of their products.
void ExpertsOp::read_ahead(const Copy& copy) const {
    for (const ExpertStack* stack : {&gate_up, &down}) {
        for (int32_t b = 0; stack->mapped && b < *copy.block_count; ++b) {
            const int32_t expert = copy.blocks[b].expert;
            if (b == 0 || expert != copy.blocks[b - 1].expert) ask_for(stack->of(expert), stack->stride);
        }
    }
}

void ExpertsOp::prepare_hidden(const Copy& copy, int64_t begin, int64_t end) const {
    for (int64_t pair = begin; pair < end; ++pair)
        second.prepare_row(hidden + pair * second.k, {}, nullptr, copy.hidden + pair * second.input_bytes);
}

// Computes columns of the hidden rows of a block. Its inputs are gathered first, unless it has one row.
void ExpertsOp::multiply_up(const Copy& copy, const Block& block, int64_t first_panel, int64_t end_panel) const {
    const int64_t stride = x_plain ? x_stride * int64_t(sizeof(float)) : first.input_bytes;
    const int64_t bytes = x_plain ? first.k * int64_t(sizeof(float)) : first.input_bytes;
    const char* const inputs = x_plain ? reinterpret_cast<const char*>(x) : copy.inputs;
    const int32_t* const row_of = copy.row_of + block.first;
    const bool gathers = block.count > 1;
    const size_t gathered = gathers ? in_lines(size_t(block.count * bytes)) : 0;
    const int64_t row_sums = (end_panel - first_panel) * kPanelRows;
    char* const scratch = static_cast<char*>(thread_scratch(gathered + size_t(block.count * row_sums) * sizeof(float)));
    float* const sums = reinterpret_cast<float*>(scratch + gathered);
    for (int32_t i = 0; gathers && i < block.count; ++i)
        std::memcpy(scratch + i * bytes, inputs + row_of[i] * stride, size_t(bytes));
    const Product::Inputs rows_of_block = {gathers ? scratch : inputs + row_of[0] * stride, bytes, block.count};

    const int64_t biases = (first.glu ? 2 : 1) * first.n_out;
    const float* const bias = options.gate_up_bias ? options.gate_up_bias + block.expert * biases : nullptr;
    first.run(gate_up.of(block.expert), rows_of_block, first_panel, end_panel, sums,
              [&](int64_t first_column, int64_t columns, EpilogueArgs e) {
                  for (int64_t i = 0; options.weigh_inputs && i < block.count * row_sums; ++i)
                      sums[i] *= copy.weight[block.first + i / row_sums];
                  e.columns = columns;
                  e.activation = options.activation;
                  e.bias = bias ? bias + first_column : nullptr;
                  e.up_bias = bias ? bias + first.n_out + first_column : nullptr;
                  e.out = hidden + block.first * first.n_out + first_column;
                  e.out_stride = first.n_out;
                  first.table->linear_epilogue(e);
              });
}

// Computes columns of out: the residual, plus the products of all blocks in order.
void ExpertsOp::multiply_down(const Copy& copy, int64_t first_panel, int64_t end_panel) const {
    if (first_panel == end_panel) return;
    const int64_t n = second.n_out, begin = first_panel * kPanelRows, end = std::min(n, end_panel * kPanelRows);
    for (int64_t row = 0; row < rows; ++row) {
        float* const columns = out + row * n + begin;
        if (!residual) std::fill_n(columns, end - begin, 0.0f);
        if (residual && residual != out) std::memcpy(columns, residual + row * n + begin, size_t(end - begin) * 4);
    }
    const int64_t stride = plain ? second.k * int64_t(sizeof(float)) : second.input_bytes;
    const char* const inputs = plain ? reinterpret_cast<const char*>(hidden) : copy.hidden;
    for (int32_t b = 0; b < *copy.block_count; ++b) {
        const Block& block = copy.blocks[b];
        const float* const bias = options.down_bias ? options.down_bias + block.expert * n : nullptr;
        float* const sums = static_cast<float*>(
            thread_scratch(size_t(block.count * (end_panel - first_panel) * kPanelRows) * sizeof(float)));
        const void* const next = b + 1 < *copy.block_count ? down.of(copy.blocks[b + 1].expert) : nullptr;
        second.run(down.of(block.expert), {inputs + block.first * stride, stride, block.count, next}, first_panel,
                   end_panel, sums, [&](int64_t first_column, int64_t columns, EpilogueArgs e) {
                       e.rows = 1;
                       e.columns = columns;
                       e.bias = bias ? bias + first_column : nullptr;
                       for (int32_t i = 0; i < block.count; ++i, e.sums += e.sums_stride) {
                           if (!options.weigh_inputs) e.scale = copy.weight[block.first + i];
                           e.out = out + copy.row_of[block.first + i] * n + first_column;
                           e.residual = e.out;
                           second.table->linear_epilogue(e);
                       }
                   });
    }
}

}  // namespace pace
