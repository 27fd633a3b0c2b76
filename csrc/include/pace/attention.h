// Shared by the attention kernels, their op and their tests: the layout of the cache and the grouping of positions.
#pragma once

#include <type_traits>

#include "pace/types.h"

namespace pace {

// Positions are grouped at fixed absolute places, so that the order of every sum depends only on a position. A block is
// the unit of allocation in the cache. A tile is one step of the online softmax. Partitions are distributed over
// threads.
constexpr int kBlockPositions = 16;
constexpr int kTilePositions = 64;
constexpr int kPartitionPositions = 1024;
constexpr int kTileBlocks = kTilePositions / kBlockPositions;

// Maximum number of elements in a head's key or value.
constexpr int kMaxHeadDim = 512;

// Maximum number of query rows that share one pass over the keys and values. 96 rows of 128 floats are 48 KB. Queries,
// sums, weights and a tile in fp32 together take 190 KB of the second-level cache. Fetching and widening a 16-bit tile
// takes a tenth of the time of 48 rows; 96 rows halve that share.
constexpr int kMaxQueryRows = 96;
// The same for latents of 512 elements: queries, sums and states of 48 rows and a tile in fp32 are 460 KB.
constexpr int kMaxLatentRows = 48;

// Space for the scales of one head's keys or values in a block, in elements. Only int8 has scales.
template <class T>
constexpr int64_t kScaleElements =
    std::is_same_v<std::remove_const_t<T>, int8_t> ? kBlockPositions * int64_t(sizeof(float)) : 0;

// One layer's cache: k [blocks][kv_heads][key_dim][16], v [blocks][kv_heads][16][padded_dim]; the strides give the
// distance between blocks. In int8, the scales of the 16 positions, float [16], follow each head of k and of v and are
// read with it. An element's value is the int8 times the scale of its position.
struct KvView {
    void* k;
    void* v;
    int64_t k_block_stride, v_block_stride;  // in elements
    DType dtype;
    int64_t num_blocks;
    int64_t kv_heads;
    int64_t key_dim, value_dim;  // elements of a head; queries have key_dim elements too

    int64_t padded_dim() const { return (value_dim + 15) / 16 * 16; }  // width of a stored value
    int64_t k_head_elements() const { return key_dim * kBlockPositions; }
    int64_t v_head_elements() const { return padded_dim() * kBlockPositions; }

    template <class T>
    T* keys(int64_t block, int64_t head) const {
        return static_cast<T*>(k) + block * k_block_stride + head * (k_head_elements() + kScaleElements<T>);
    }
    template <class T>
    T* values(int64_t block, int64_t head) const {
        return static_cast<T*>(v) + block * v_block_stride + head * (v_head_elements() + kScaleElements<T>);
    }

    // Scales of an int8 head: float [16].
    float* key_scales(int64_t block, int64_t head) const {
        return reinterpret_cast<float*>(keys<int8_t>(block, head) + k_head_elements());
    }
    float* value_scales(int64_t block, int64_t head) const {
        return reinterpret_cast<float*>(values<int8_t>(block, head) + v_head_elements());
    }
};

constexpr int64_t kNoWindow = int64_t(1) << 40;

// Settings of a layer's attention: AttentionOptions of pace/ops/protocol.py.
struct AttentionOptions {
    float scale = 1;
    int64_t window = kNoWindow;    // number of positions that each position sees up to itself, which is included
    bool chunked = false;          // positions are divided into chunks of `window`, and see none before their own chunk
    bool causal = false;           // ignores Spans::newest and Spans::oldest: each position sees up to itself
    float softcap = 0;             // scores become softcap * tanh(score / softcap); 0 = off
    const float* sinks = nullptr;  // [query_heads], or null
    // [query_heads], or null. A score of position j for a row at p adds slope * (j - p); without softcap. With
    // bf16_bias it adds scale * bf16(slope * bf16(j)), with products rounded to bf16.
    const float* slopes = nullptr;
    bool bf16_bias = false;
    // [query_heads][2 * bias_radius + 1], or null. A score of position j for a row at p adds element bias_radius + d of
    // its head. d is j - p, limited to -bias_radius .. bias_radius. Without softcap and slopes.
    const float* biases = nullptr;
    int64_t bias_radius = 0;

    // The first position that `position` sees.
    int64_t oldest(int64_t position) const {
        if (chunked) return position / window * window;
        return position < window ? 0 : position - window + 1;
    }
};

// The tokens of a step, by sequence: Spans of pace/batch.py.
struct Spans {
    int64_t count;
    const int32_t* query_start;       // [count + 1]
    const int32_t* kv_len;            // [count]
    const int32_t* block_table;       // [count][table_stride]
    int64_t table_stride;             // blocks of each span
    const int32_t* newest = nullptr;  // [tokens]: the newest position that each sees; null: its own
    const int32_t* oldest = nullptr;  // [tokens]: each sees from here on, if its window begins later; or null
};

struct AttentionArgs : AttentionOptions {
    int64_t q_token_stride;  // of queries [tokens][heads][key_dim], in floats
    int64_t q_head_stride;
    KvView kv;
    int64_t query_heads;  // a multiple of kv.kv_heads; head h reads kv head h / group()
    float* out;           // [tokens][query_heads * value_dim]

    // Not null if values are latents, which also act as keys. The score then adds the product of this query
    // [tokens][query_heads][value_dim] and the value to the product of q and the key.
    const float* latent_q = nullptr;
    int64_t latent_token_stride = 0, latent_head_stride = 0;

    int64_t group() const { return query_heads / kv.kv_heads; }
    int max_rows() const { return latent_q ? kMaxLatentRows : kMaxQueryRows; }
};

// Query rows that share one pass over the keys and values: rows of one span and one kv head. They are numbered token by
// token and, within a token, head by head of the group. Row r of the span is token r / group, head r % group.
struct QueryRows {
    const float* q;          // query of the span's first token and the group's first head
    int64_t first_token;     // index of the span's first token in out
    int64_t first_position;  // the position of that token in its sequence
    const int32_t* blocks;   // the span's block table
    int64_t kv_head;
    int64_t first_row;                // within the span
    int rows;                         // 1..AttentionArgs::max_rows()
    const int32_t* newest = nullptr;  // Spans::newest from the span's first token on, or null
    const int32_t* oldest = nullptr;  // Spans::oldest, likewise

    int64_t position(int64_t group, int row) const { return first_position + (first_row + row) / group; }
    int64_t head(int64_t group, int row) const { return kv_head * group + (first_row + row) % group; }
    // The oldest position that the row sees.
    int64_t oldest_of(const AttentionArgs& args, int row) const {
        const int64_t group = args.group(), own = args.oldest(position(group, row));
        if (!oldest) return own;
        const int64_t given = oldest[(first_row + row) / group];
        return given < own ? given : own;
    }
    // The oldest position that any of the rows sees. Without given ones, it is the first row's.
    int64_t oldest_of_all(const AttentionArgs& args) const {
        int64_t first = oldest_of(args, 0);
        for (int row = 1; oldest && row < rows; ++row) {
            if (const int64_t own = oldest_of(args, row); own < first) first = own;
        }
        return first;
    }
    // The newest position that the row sees.
    int64_t newest_of(int64_t group, int row) const {
        return newest ? newest[(first_row + row) / group] : position(group, row);
    }
    // The newest position that any of the rows sees.
    int64_t newest_of_all(int64_t group) const {
        int64_t last = newest_of(group, rows - 1);
        for (int row = 0; newest && row < rows; ++row) {
            if (const int64_t own = newest_of(group, row); own > last) last = own;
        }
        return last;
    }
};

// Space for rows of one pass in the packed queries: each element is stored for this many rows, side by side.
constexpr int kPackedRows = 8;

// A row's state after some positions: maximum score, sum of exp(score - max), and, from kPartialOut on, the
// unnormalised sum of values.
constexpr int64_t kPartialOut = 16;
inline int64_t partial_floats(const KvView& kv) { return kPartialOut + kv.padded_dim(); }

// Floats of the packed queries. Each query takes whole cache lines.
inline int64_t packed_query_floats(const KvView& kv, int64_t passes) {
    return passes * kPackedRows * ((kv.key_dim + 15) / 16 * 16);
}

// Floats of scratch that the attention kernels need for any QueryRows. It holds queries (in passes of two rows or
// more), latent queries, scores, out and three vectors of state. It also holds the state of earlier partitions, and a
// tile of keys and values in fp32.
inline int64_t attention_scratch_floats(const AttentionArgs& args) {
    const KvView& kv = args.kv;
    const int64_t query_floats = packed_query_floats(kv, args.max_rows() / 2);
    const int64_t latent_floats = args.latent_q ? kv.padded_dim() : 0;
    const int64_t row_floats = latent_floats + kv.padded_dim() + kTilePositions + 3 + partial_floats(kv);
    return query_floats + args.max_rows() * row_floats + kTileBlocks * (kv.k_head_elements() + kv.v_head_elements());
}

}  // namespace pace
