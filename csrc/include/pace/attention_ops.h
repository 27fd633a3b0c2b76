// Attention over the block cache, and the ops that write the cache. For the use of an op see pace/ops.h.
#pragma once

#include <vector>

#include "pace/kernels.h"
#include "pace/row_ops.h"

namespace pace {

// Preparation of the heads of new tokens, between the product that computes them and attention. Query and key heads are
// normalised (unless the norms are None) and rotated (if half > 0), or the other way round. Values are normalised. Keys
// and values are stored in the cache. Without keys and values, only queries are prepared.
struct HeadsArgs {
    HeadsView q, k, v;  // queries and keys of key_dim elements, values of value_dim
    int64_t query_heads;
    Norm query_norm, key_norm, value_norm;
    bool norm_last;          // rotate before the norms
    const float *cos, *sin;  // [tokens][half]
    int64_t half;
    bool interleaved;
    KvView kv;
    const int64_t* slots;  // [tokens]

    explicit operator bool() const { return q.data != nullptr; }
    bool stores() const { return k.data != nullptr; }
};

// csrc/ops/heads.cpp. Prepares kv_heads key/value heads from `first_head` on, and their query heads, of `tokens` tokens
// from `first_token` on, in place.
void prepare_heads(const HeadsArgs& heads, int64_t first_token, int64_t tokens, int64_t first_head, int64_t kv_heads);
// Copies the query heads of one token and one key/value head to `queries` [group][key_dim] and prepares them there.
void prepare_queries(const HeadsArgs& heads, int64_t token, int64_t kv_head, float* queries);
// Prepares the key and the value of one token and one head in `own` [key_dim + value_dim], and stores them.
void store_key_value(const HeadsArgs& heads, int64_t token, int64_t kv_head, float* own);
// Number of tokens for a chunk of preparation (about 2 us of work).
int64_t prepared_tokens_per_chunk(const HeadsArgs& heads);

// csrc/ops/attention.cpp. args.out [tokens][query_heads * value_dim] = attention of every token of every span over its
// own positions. Blocks before every token's window are not read.
//
// If `heads` is set, heads are prepared and stored first. A span that fits into one tile of rows, as in a decode step,
// needs no barrier for that. Each of its tasks prepares the queries it reads, and stores the keys and values of its own
// head and positions. If the rows of a tile are cut over threads, its heads are prepared in an earlier phase, before a
// barrier. The same holds for all spans with `newest`.
struct AttentionOp {
    // Prepare heads of long spans or cut rows; compute rows, or single partitions of them; merge.
    enum Phases : int { kPrepare, kRows, kMerge, kPhases };
    const float* q;  // [tokens][query_heads][key_dim], strides in args
    AttentionArgs args;
    HeadsArgs heads;  // for the same q, or none
    int64_t tokens;
    Spans spans;

    // Throws std::invalid_argument if spans do not cover the tokens in order or name a block that does not exist. The
    // same for an oldest position outside of its span, and for a newest one before the token's oldest.
    void prepare(int threads);
    int64_t chunks(int phase) const;
    void run(int phase, int64_t chunk, int thread) const;

    // Holds the states of single partitions until they are merged.
    size_t workspace_bytes() const { return size_t(state_floats) * sizeof(float); }
    void set_workspace(void* memory) { states = static_cast<float*>(memory); }

  private:
    struct Preparation {  // a chunk of phase 0
        int64_t first_token, tokens, first_head, kv_heads;
    };
    struct Tile {  // up to args.max_rows() rows of one span and one key/value head
        QueryRows rows;
        bool prepares;  // prepares its queries, and the keys and values it stores
    };
    struct Task {  // a chunk of phase 1
        QueryRows rows;
        int64_t partition;  // -1: all partitions, written to out
        int64_t state;      // offset in `states`
        bool prepares;
    };
    struct Merge {  // a chunk of phase 2
        QueryRows rows;
        int64_t partitions;
        int64_t state;  // offset of the first partition's
    };
    const KernelTable* table;
    std::vector<Preparation> preparations;
    std::vector<Tile> tiles;
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    int64_t state_floats;
    float* states;

    void check_span(int64_t span) const;
    void add_tiles(int64_t span);
    void cut_tiles(int threads);
    void run_task(const Task& task) const;
};

// csrc/ops/attention.cpp. Writes keys and values of `tokens` tokens into the cache, token t at position slots[t].
struct StoreKvOp {
    static constexpr int kPhases = 1;
    KvView kv;
    HeadsView k, v;  // [tokens][kv_heads][key_dim], [..][value_dim]; read only
    const int64_t* slots;
    int64_t tokens;

    void prepare(int threads);  // throws std::invalid_argument for a slot outside the cache
    int64_t chunks(int) const;
    void run(int phase, int64_t chunk, int thread) const;
};

// Throws std::invalid_argument for a slot outside the cache.
void check_slots(const int64_t* slots, int64_t tokens, const KvView& kv);

}  // namespace pace
