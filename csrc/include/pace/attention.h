// What the attention kernel, its op and its tests share: how the cache is laid out and how positions are grouped.
#pragma once

#include <type_traits>

#include "pace/types.h"

namespace pace {

// Positions are grouped at fixed absolute places, so that the order of every sum depends on a position alone:
// a block is what the cache allocates, a tile is one step of the online softmax, a partition is what threads share.
constexpr int kBlockPositions = 16;
constexpr int kTilePositions = 64;
constexpr int kPartitionPositions = 1024;
constexpr int kTileBlocks = kTilePositions / kBlockPositions;

// The most query rows that go over the keys and values together. 96 rows of 128 floats are 48 KB: queries, sums,
// weights and a tile in fp32 are 190 KB in the second-level cache, and fetching and widening a 16-bit tile, a tenth of
// the time of 48 rows, is shared by twice as many.
constexpr int kMaxQueryRows = 96;
// Of latents of 512: queries, sums and states of 48 rows and a tile in fp32 are 460 KB.
constexpr int kMaxLatentRows = 48;

// The scales of a head's keys or values in a block, counted in its elements; none but int8 has them.
template <class T>
constexpr int64_t kScaleElements =
    std::is_same_v<std::remove_const_t<T>, int8_t> ? kBlockPositions * int64_t(sizeof(float)) : 0;

// One layer's cache: k [blocks][kv_heads][key_dim][16], v [blocks][kv_heads][16][padded_dim], blocks as far apart as
// the strides say. In int8, each head of k and of v is followed by the scales of its 16 positions, float [16], a line
// that is read with it: an element stands for itself times the scale of its position.
struct KvView {
    void* k;
    void* v;
    int64_t k_block_stride, v_block_stride;  // in elements
    DType dtype;
    int64_t num_blocks;
    int64_t kv_heads;
    int64_t key_dim, value_dim;  // elements of a head; queries are as wide as keys

    int64_t padded_dim() const { return (value_dim + 15) / 16 * 16; }  // of a value
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

    // Of int8: float [16].
    float* key_scales(int64_t block, int64_t head) const {
        return reinterpret_cast<float*>(keys<int8_t>(block, head) + k_head_elements());
    }
    float* value_scales(int64_t block, int64_t head) const {
        return reinterpret_cast<float*>(values<int8_t>(block, head) + v_head_elements());
    }
};

constexpr int64_t kNoWindow = int64_t(1) << 40;

struct AttentionArgs {
    int64_t q_token_stride;  // of queries [tokens][heads][key_dim], in floats
    int64_t q_head_stride;
    KvView kv;
    int64_t query_heads;  // a multiple of kv.kv_heads; head h reads kv head h / group()
    float scale;
    int64_t window;  // a position sees this many, itself included; kNoWindow = all before it
    float softcap;   // scores become softcap * tanh(score / softcap); 0 = off
    float* out;      // [tokens][query_heads * value_dim]
    const float* sinks =
        nullptr;  // [query_heads]: one more score of each head, not times scale, without a value; or null

    // Where values are latents, they are keys as well: a score is that of q and the key, plus that of this query
    // [tokens][query_heads][value_dim] and the value. Null: values are values alone.
    const float* latent_q = nullptr;
    int64_t latent_token_stride = 0, latent_head_stride = 0;

    // Positions fall into chunks of `window`, and each sees those of its own chunk alone, up to itself.
    bool chunked = false;

    // The first that a position sees.
    int64_t oldest(int64_t position) const {
        if (chunked) return position / window * window;
        return position < window ? 0 : position - window + 1;
    }
    int64_t group() const { return query_heads / kv.kv_heads; }
    int max_rows() const { return latent_q ? kMaxLatentRows : kMaxQueryRows; }
};

// Query rows that go over the keys and values together: rows of one span and one kv head, numbered token by token and,
// within a token, head by head of the group. Row r of the span is token r / group, head r % group.
struct QueryRows {
    const float* q;          // of the span's first token and the group's first head
    int64_t first_token;     // in out: the span's first token
    int64_t first_position;  // the position of that token in its sequence
    const int32_t* blocks;   // the span's block table
    int64_t kv_head;
    int64_t first_row;  // within the span
    int rows;           // 1..AttentionArgs::max_rows()

    int64_t position(int64_t group, int row) const { return first_position + (first_row + row) / group; }
};

// Rows of a pass stand side by side in the packed queries, in the space of this many.
constexpr int kPackedRows = 8;

// A row's state after some positions: max, sum of exp(score - max), and at kPartialOut the unnormalised sum of values.
constexpr int64_t kPartialOut = 16;
inline int64_t partial_floats(const KvView& kv) { return kPartialOut + kv.padded_dim(); }

// Floats of the packed queries, of which each stands in the space of whole lines.
inline int64_t packed_query_floats(const KvView& kv, int64_t passes) {
    return passes * kPackedRows * ((kv.key_dim + 15) / 16 * 16);
}

// Floats of scratch that the attention kernels need for any QueryRows: queries (in passes of two rows or more) and those
// of latents, scores, out, three vectors of state, the partitions before, and a tile of keys and values in fp32.
inline int64_t attention_scratch_floats(const AttentionArgs& args) {
    const KvView& kv = args.kv;
    const int64_t query_floats = packed_query_floats(kv, args.max_rows() / 2);
    const int64_t latent_floats = args.latent_q ? kv.padded_dim() : 0;
    const int64_t row_floats = latent_floats + kv.padded_dim() + kTilePositions + 3 + partial_floats(kv);
    return query_floats + args.max_rows() * row_floats + kTileBlocks * (kv.k_head_elements() + kv.v_head_elements());
}

}  // namespace pace
