// Cuts attention into tiles of query rows. If there are fewer tiles than threads, tiles are cut into partitions of
// their positions, and then into single rows if needed. All cuts give the same bits, so the choice may depend on the
// number of threads.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "pace/attention_ops.h"
#include "pace/threading.h"

namespace pace {

namespace {

// With fewer chunks per thread than this, long rows are split by partition. Fewer chunks would leave threads idle at
// the end; more would only add states to write and read again.
constexpr int64_t kChunksPerThread = 4;

// The partitions [first, last) that any of the rows sees, and their number of positions.
struct PartitionRange {
    int64_t first, last, positions;
    int64_t count() const { return last - first; }
};

PartitionRange partitions_of(const AttentionArgs& args, const QueryRows& rows) {
    const int64_t oldest = rows.oldest_of_all(args);
    const int64_t newest = rows.newest_of_all(args.group());
    return {oldest / kPartitionPositions, newest / kPartitionPositions + 1, newest - oldest + 1};
}

// Reading and widening a tile of keys and values takes as long as multiplying it by this many rows (AVX2: 2, AVX-512:
// 3). Each piece of the rows repeats it.
constexpr int kReadRows = 3;

// Cutting rows adds another barrier, of about 2 us. An AVX-512 core does this many multiply-adds in that time, and a
// cut must save at least that. With 7 heads of 64 elements on two threads instead of one, it does from 470 positions
// on.
constexpr int64_t kCutWork = 180'000;

// The number of pieces for the rows of each of `tasks` tasks (fewer than threads). It is the smallest number that
// minimises the busiest thread's work. `row_work`: multiply-adds of a row.
int row_pieces(int rows, int64_t row_work, int64_t tasks, int threads) {
    const int64_t whole = kReadRows + rows;
    int64_t least = whole;
    int best = 1;
    for (int pieces = 2; pieces <= std::min(rows, threads); ++pieces) {
        const int64_t turns = divide_up(tasks * pieces, threads),
                      busiest = turns * (kReadRows + divide_up(rows, pieces));
        if (busiest < least) least = busiest, best = pieces;
    }
    return (whole - least) * row_work >= kCutWork ? best : 1;
}

[[noreturn]] void refuse(int64_t span, const std::string& what) {
    throw std::invalid_argument("span " + std::to_string(span) + ": " + what);
}

}  // namespace

void AttentionOp::check_span(int64_t span) const {
    const int64_t begin = spans.query_start[span], end = spans.query_start[span + 1], length = spans.kv_len[span];
    if (begin > end || end > tokens) {
        refuse(span, "query_start goes from " + std::to_string(begin) + " to " + std::to_string(end) +
                         "; it must not fall and "
                         "must end at the " +
                         std::to_string(tokens) + " tokens of q");
    }
    if (length < end - begin) {
        refuse(span, "kv_len is " + std::to_string(length) + ", less than its own " + std::to_string(end - begin) +
                         " tokens");
    }
    if (divide_up(length, kBlockPositions) > spans.table_stride) {
        refuse(span, "kv_len is " + std::to_string(length) + ", more than " + std::to_string(spans.table_stride) +
                         " blocks hold");
    }
    if (begin == end) return;
    int64_t oldest = args.oldest(length - (end - begin));
    for (int64_t token = begin; spans.oldest && token < end; ++token) {
        const int64_t given = spans.oldest[token];
        if (given < 0 || given >= length) {
            refuse(span, "the oldest position of token " + std::to_string(token) + " is " + std::to_string(given) +
                             "; it must be between 0 and " + std::to_string(length - 1));
        }
        oldest = std::min(oldest, given);
    }
    for (int64_t block = oldest / kBlockPositions; block * kBlockPositions < length; ++block) {
        const int64_t id = spans.block_table[span * spans.table_stride + block];
        if (id < 0 || id >= args.kv.num_blocks) {
            refuse(span, "entry " + std::to_string(block) + " of the block table is " + std::to_string(id) +
                             "; blocks are numbered 0 to " + std::to_string(args.kv.num_blocks - 1));
        }
    }
    for (int64_t token = begin; spans.newest && token < end; ++token) {
        int64_t first = args.oldest(length - end + token);
        if (spans.oldest) first = std::min<int64_t>(first, spans.oldest[token]);
        const int64_t newest = spans.newest[token];
        if (newest < first || newest >= length) {
            refuse(span, "the newest position of token " + std::to_string(token) + " is " + std::to_string(newest) +
                             "; it must be between " + std::to_string(first) + " and " + std::to_string(length - 1));
        }
    }
}

void AttentionOp::prepare(int threads) {
    table = &kernels();
    if (args.causal) spans.newest = spans.oldest = nullptr;
    if (spans.query_start[0] != 0 || spans.query_start[spans.count] != tokens) {
        throw std::invalid_argument("query_start must go from 0 to the " + std::to_string(tokens) +
                                    " tokens of q; it goes from " + std::to_string(spans.query_start[0]) + " to " +
                                    std::to_string(spans.query_start[spans.count]));
    }
    if (heads.stores()) check_slots(heads.slots, tokens, args.kv);
    preparations.clear();
    tiles.clear();
    for (int64_t span = 0; span < spans.count; ++span) {
        check_span(span);
        add_tiles(span);
    }
    tasks.clear();
    merges.clear();
    state_floats = 0;
    if (int64_t(tiles.size()) >= kChunksPerThread * threads || threads == 1) {
        for (const Tile& tile : tiles) tasks.push_back({tile.rows, -1, 0, tile.prepares});
    } else {
        cut_tiles(threads);
    }
}

void AttentionOp::add_tiles(int64_t span) {
    const int64_t group = args.group(), begin = spans.query_start[span], end = spans.query_start[span + 1];
    const int64_t span_rows = (end - begin) * group, first_position = spans.kv_len[span] - (end - begin);
    const int64_t max_rows = args.max_rows();
    // A task stores the new positions of the partition that it computes. With `newest`, the partitions that a tile sees
    // may lack its own positions, so these are stored in the phase before.
    const bool prepares = heads && span_rows <= max_rows && !spans.newest;
    if (heads && !prepares) {
        const int64_t step = prepared_tokens_per_chunk(heads);
        for (int64_t t = begin; t < end; t += step)
            preparations.push_back({t, std::min(step, end - t), 0, args.kv.kv_heads});
    }
    // The last tiles of a span see the most positions. They go first, so that no long chunk starts last.
    for (int64_t tile = divide_up(span_rows, max_rows) - 1; tile >= 0; --tile) {
        const int64_t first_row = tile * max_rows;
        const int rows = int(std::min(max_rows, span_rows - first_row));
        for (int64_t head = 0; head < args.kv.kv_heads; ++head) {
            const int32_t* const blocks = spans.block_table + span * spans.table_stride;
            const int32_t* const newest = spans.newest ? spans.newest + begin : nullptr;
            const int32_t* const oldest = spans.oldest ? spans.oldest + begin : nullptr;
            const float* const queries = q + begin * args.q_token_stride + head * group * args.q_head_stride;
            tiles.push_back(
                {{queries, begin, first_position, blocks, head, first_row, rows, newest, oldest}, prepares});
        }
    }
}

void AttentionOp::cut_tiles(int threads) {
    int64_t partitions = int64_t(tiles.size());  // lower bound
    if (partitions < threads) {
        partitions = 0;
        for (const Tile& tile : tiles) partitions += partitions_of(args, tile.rows).count();
    }
    for (const Tile& tile : tiles) {
        const PartitionRange range = partitions_of(args, tile.rows);
        const bool is_merged = range.count() > 1;
        if (partitions >= threads && !is_merged) {
            tasks.push_back({tile.rows, -1, 0, tile.prepares});
            continue;
        }
        const int64_t row_work = std::min<int64_t>(range.positions, kPartitionPositions) *
                                 (args.kv.key_dim + (args.latent_q ? 2 : 1) * args.kv.value_dim);
        const int pieces = partitions < threads ? row_pieces(tile.rows.rows, row_work, partitions, threads) : 1;
        // All pieces read the same new keys, so those are stored once, in the phase before.
        const bool prepares = tile.prepares && pieces == 1;
        if (tile.prepares && !prepares)
            preparations.push_back({tile.rows.first_token, tile.rows.rows / args.group(), tile.rows.kv_head, 1});
        if (is_merged) merges.push_back({tile.rows, range.count(), state_floats});
        for (int64_t partition = range.first; partition < range.last; ++partition) {
            for (int piece = 0; piece < pieces; ++piece) {
                const auto [first, last] = ThreadPool::share(tile.rows.rows, piece, pieces);
                QueryRows rows = tile.rows;
                rows.first_row += first;
                rows.rows = int(last - first);
                tasks.push_back({rows, is_merged ? partition : -1, state_floats, prepares});
                if (is_merged) state_floats += rows.rows * partial_floats(args.kv);
            }
        }
    }
}

int64_t AttentionOp::chunks(int phase) const {
    return int64_t(phase == kPrepare ? preparations.size() : phase == kRows ? tasks.size() : merges.size());
}

void AttentionOp::run(int phase, int64_t chunk, int) const {
    if (phase == kPrepare) {
        const Preparation& p = preparations[chunk];
        return prepare_heads(heads, p.first_token, p.tokens, p.first_head, p.kv_heads);
    }
    if (phase == kRows) return run_task(tasks[chunk]);
    const Merge& merge = merges[chunk];
    float* const scratch = static_cast<float*>(thread_scratch(attention_scratch_floats(args) * sizeof(float)));
    table->attention_merge(args, merge.rows, merge.partitions, states + merge.state, scratch);
}

void AttentionOp::run_task(const Task& task) const {
    const int64_t dim = args.kv.key_dim, group = args.group();
    const int64_t kernel_floats = attention_scratch_floats(args),
                  own_floats = task.prepares ? (args.max_rows() + 1) * dim + args.kv.value_dim : 0;
    float* const scratch = static_cast<float*>(thread_scratch((kernel_floats + own_floats) * sizeof(float)));
    AttentionArgs a = args;
    QueryRows rows = task.rows;
    if (task.prepares) {
        float *const queries = scratch + kernel_floats, *const own = queries + args.max_rows() * dim;
        for (int64_t t = 0; t < rows.rows / group; ++t) {
            const int64_t token = rows.first_token + t, position = rows.first_position + t;
            prepare_queries(heads, token, rows.kv_head, queries + t * group * dim);
            const bool is_here = task.partition < 0 || position / kPartitionPositions == task.partition;
            if (is_here && heads.stores()) store_key_value(heads, token, rows.kv_head, own);
        }
        rows.q = queries;
        a.q_token_stride = group * dim;
        a.q_head_stride = dim;
    }
    if (task.partition < 0) {
        table->attention(a, rows, scratch);
    } else {
        table->attention_partition(a, rows, task.partition, states + task.state, scratch);
    }
}

namespace {
constexpr int64_t kStoreTokens = 16;
}

void check_slots(const int64_t* slots, int64_t tokens, const KvView& kv) {
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] < 0 || slots[t] >= kv.num_blocks * kBlockPositions) {
            throw std::invalid_argument("slot " + std::to_string(slots[t]) + " of token " + std::to_string(t) +
                                        " is outside of the cache of " + std::to_string(kv.num_blocks) +
                                        " blocks of 16");
        }
    }
}

void StoreKvOp::prepare(int) { check_slots(slots, tokens, kv); }

int64_t StoreKvOp::chunks(int) const { return divide_up(tokens, kStoreTokens); }

void StoreKvOp::run(int, int64_t chunk, int) const {
    const auto store = kernels().store_kv;
    const int64_t end = std::min(tokens, (chunk + 1) * kStoreTokens);
    for (int64_t t = chunk * kStoreTokens; t < end; ++t) {
        store(k.at(t, 0), k.head_stride, v.at(t, 0), v.head_stride, kv, 0, kv.kv_heads, slots[t]);
    }
}

}  // namespace pace
