// Attention over the block cache, and what writes the cache. For how an op is used see pace/ops.h.
#pragma once

#include <vector>

#include "pace/kernels.h"
#include "pace/row_ops.h"

namespace pace {

// csrc/ops/attention.cpp. args.out [tokens][query_heads * head_dim] = attention of every token of every span over its own
// positions. Span s has tokens query_start[s] .. query_start[s + 1]; its last token stands at position kv_len[s] - 1; position p
// lives in block block_table[s * table_stride + p / 16]. Blocks wholly before every token's window are not looked at.
struct AttentionOp {
    static constexpr int kPhases = 2;  // rows, or single partitions of them; merge
    AttentionArgs args;
    int64_t tokens;
    int64_t spans;
    const int32_t* query_start;  // [spans + 1]
    const int32_t* kv_len;       // [spans]
    const int32_t* block_table;  // [spans][table_stride]
    int64_t table_stride;        // entries of the table per span

    // Throws std::invalid_argument if spans do not cover the tokens in order or name a block that does not exist.
    void prepare(int threads);
    int64_t chunks(int phase) const;
    void run(int phase, int64_t chunk, int thread) const;

    // The states of single partitions, until they are merged.
    size_t workspace_bytes() const { return size_t(state_floats) * sizeof(float); }
    void set_workspace(void* memory) { states = static_cast<float*>(memory); }

private:
    struct Task {              // a chunk of phase 0
        QueryRows rows;
        int64_t partition;     // -1: all partitions, straight into out
        int64_t state;         // where in `states`
    };
    struct Merge {             // a chunk of phase 1
        QueryRows rows;
        int64_t partitions;
        int64_t state;         // of the first partition
    };
    const KernelTable* table;
    std::vector<Task> tasks, whole_tasks;
    std::vector<Merge> merges;
    int64_t state_floats;
    float* states;

    void check_span(int64_t span) const;
};

// csrc/ops/attention.cpp. Keys and values of `tokens` tokens into the cache, token t at position slots[t].
struct StoreKvOp {
    static constexpr int kPhases = 1;
    KvView kv;
    const float *k, *v;  // [tokens][kv_heads][head_dim], strides in floats
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    const int64_t* slots;
    int64_t tokens;

    void prepare(int threads);  // throws std::invalid_argument for a slot outside of the cache
    int64_t chunks(int) const;
    void run(int phase, int64_t chunk, int thread) const;
};

// csrc/ops/heads.cpp. What happens to the heads of a token between the product that makes them and attention: query and key
// heads are normalised (where the norms are not None) and rotated (where half > 0) in place, then keys and values are stored.
struct PrepareHeadsOp {
    static constexpr int kPhases = 1;
    float *q, *k;              // [tokens][heads][head_dim], heads contiguous
    const float* v;
    int64_t token_stride;      // of all three, in floats
    int64_t query_heads, tokens;
    Norm query_norm, key_norm;
    const float *cos, *sin;    // [tokens][half]
    int64_t half;
    bool interleaved;
    KvView kv;
    const int64_t* slots;

    void prepare(int threads);  // throws std::invalid_argument for a slot outside of the cache
    int64_t chunks(int) const { return chunk_count; }
    void run(int phase, int64_t chunk, int thread) const;

    int64_t chunk_count, tokens_per_chunk;
};

// Throws std::invalid_argument for a slot outside of the cache.
void check_slots(const int64_t* slots, int64_t tokens, const KvView& kv);

}  // namespace pace
