// Attention over the block cache, and what writes the cache. For how an op is used see pace/ops.h.
#pragma once

#include <memory>
#include <vector>

#include "pace/kernels.h"

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
    void run(int phase, int64_t chunk) const;

private:
    struct Task {              // a chunk of phase 0
        QueryRows rows;
        int64_t partition;     // -1: all partitions, straight into out
        float* states;
    };
    struct Merge {             // a chunk of phase 1
        QueryRows rows;
        int64_t partitions;
        const float* states;
    };
    const KernelTable* table;
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    std::unique_ptr<float[]> states;

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
    void run(int phase, int64_t chunk) const;
};

}  // namespace pace
