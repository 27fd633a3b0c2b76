// Attention of a few query rows over the block cache: the same code for decode, prefill and everything between.
//
// SHAPES      R rows (<= 96) of D; keys [D][16] and values [16][Dp] per block of 16 positions, Dp = D rounded up to 16
// DEFINITION  for each row at position p, over the positions j in max(0, p - window + 1) .. p:
//               s[j] = scale * sum_d q[d] k[d][j]               (softcap: s = c tanh(s / c))
//               out[d] = sum_j exp(s[j] - max s) v[j][d] / sum_j exp(s[j] - max s)
// LAYOUT      A tile of 64 positions is four blocks. Both products are small GEMMs with the same register tile,
//             R x (vectors of 16 positions or of 16 d), operand A broadcast, operand B loaded:
//
//               scores [R][64] = q  [D][R] transposed  x  keys   [D][16] per block
//               out    [R][Dp] += weights [R][64]       x  values [16][Dp] per block
//
//             All query heads of a group and all tokens of the rows share each load of a key or value.
// NUMERICS    fp32. A score is one chain of fma over d ascending; out is one chain of fma over j ascending within a tile, scaled
//             by 2^(old max - new max) between tiles; scores are kept times log2 e, so that exp is a power of two (2^x: 1.4
//             ulp); partitions of 1024 positions are computed from nothing and merged in
//             order. Tiles and partitions stand at absolute positions. So a row's bits depend on its own position, its own
//             visible keys and values, and the instruction set; not on R, the span, the batch or the threads. Positions that a
//             row does not see are neither multiplied nor added: NaN there stays there.
//
// Tile sizes: 6 rows x 2 vectors (AVX2) are 12 accumulators, 2 values and a broadcast in 16 registers; 6 x 4 (AVX-512) are 24 + 4
// in 32, and 10 loads for 24 fma. Rows are spread evenly over passes (13 = 5 + 4 + 4), because with one query head per row a
// decode step of a wide group is bound by arithmetic as much as by memory. AVX-512 takes 7 and 8 rows at once, x 2: a
// 16-bit key is then fetched and widened once, not twice.

constexpr int kPassRows = kLanes == 4 ? 2 : 6;
constexpr int kOnePassRows = kLanes == 16 ? 8 : kPassRows;  // up to these, there is one pass
static_assert(kOnePassRows <= kPackedRows);
constexpr int kBlockVectors = kBlockPositions / kLanes;
// With few rows, more columns keep enough independent chains in flight.
template <int R>
constexpr int kPassVectors = kLanes == 16 ? (R <= 6 ? 4 : 2) : kLanes == 8 ? (R <= 3 ? 4 : 2) : 4;

// ---------------------------------------------------------------------------------------------------------------------
// The two products
// ---------------------------------------------------------------------------------------------------------------------

// sums[r][v] += scalar(r) * column(v). The shorter operand is kept in registers and the other one streams through: 3 rows x 4
// vectors on AVX2 are 12 sums, 3 scalars and a column in its 16 registers, where 4 columns and a scalar would be one too many
// (g++ then kept a sum in memory, and 3 rows took 1.7 times as long).
template <int R, int kVectors, class Scalar, class Column>
PACE_INLINE void multiply_add(const Scalar& scalar, const Column& column, F32 (&sums)[R][kVectors]) {
    if constexpr (kVectors <= R) {
        F32 columns[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) columns[v] = column(v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F32 a = scalar(r);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(a, columns[v], sums[r][v]);
        }
    } else {
        F32 scalars[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) scalars[r] = scalar(r);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const F32 b = column(v);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][v] = fma(scalars[r], b, sums[r][v]);
        }
    }
}

// Decode reads every key and value once, from blocks that lie anywhere: the processor's own prefetcher starts anew with each
// and the products would wait for memory half of the time. So while the scores of a tile are computed, its values are fetched,
// and with them the keys of the next tile: at each step the same place of the other block, which is about as large. Two passes
// fetch half of the blocks each, so that memory is asked for evenly. Into the second-level cache: the first one can wait for too
// few lines at once, and fetching into it ran at 0.55 of the read bandwidth where this runs at 0.69 (Zen 4, 2 threads, 32 query
// on 8 key/value heads of 128 at 4k).
template <bool kAhead>
PACE_INLINE void fetch_ahead(const void* from, int64_t offset_bytes, int bytes) {
    if constexpr (kAhead) {
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + offset_bytes + i, 0, 2);
    }
}

// More rows than two passes widen a 16-bit tile first and have work enough to hide the reads.
constexpr int kFetchPasses = 2;

// scores[r][0 .. 16 B) = sum_d q[d][r] * keys_b[d][16], for B blocks side by side. `ahead`: a block to fetch for each.
template <int R, bool kAhead, class T>
static void score_pass(const float* q, const T* const* keys, const T* const* ahead, int64_t head_dim, float* scores) {
    constexpr int kVectors = kPassVectors<R>, kBlocks = kVectors / kBlockVectors;
    const T *k[kBlocks], *next[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) k[b] = keys[b], next[b] = ahead[b];
    F32 sums[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        const int64_t row_bytes = kBlockPositions * sizeof(T);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) fetch_ahead<kAhead>(next[b], d * row_bytes, row_bytes);
        const auto query = [&](int r) __attribute__((always_inline)) { return broadcast(q[d * kPackedRows + r]); };
        const auto key = [&](int v) __attribute__((always_inline)) {
            return load(k[v / kBlockVectors] + d * kBlockPositions + v % kBlockVectors * kLanes);
        };
        multiply_add(query, key, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(scores + r * kTilePositions + v * kLanes, sums[r][v]);
    }
}

// out[r][0 .. kVectors * lanes) += sum over positions j in [begin, end) of the tile of weights[r][j] * values[j][...].
template <int R, int kVectors, bool kAhead, class T>
static void value_pass(const float* weights, const T* const* values, const T* const* ahead, int64_t column,
                       int64_t padded_dim, int begin, int end, float* out) {
    F32 sums[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + r * padded_dim + v * kLanes);
    }
    for (int block = begin / kBlockPositions; block * kBlockPositions < end; ++block) {
        const int block_begin = block * kBlockPositions, block_end = block_begin + kBlockPositions;
        const int first = begin > block_begin ? begin : block_begin, last = end < block_end ? end : block_end;
        const T* row = values[block] + (first - block_begin) * padded_dim + column;
        for (int j = first; j < last; ++j, row += padded_dim) {
            const int64_t offset_bytes = (row - values[block]) * int64_t(sizeof(T));
            fetch_ahead<kAhead>(ahead[block], offset_bytes, kVectors * kLanes * sizeof(T));
            const auto weight = [&](int r) __attribute__((always_inline)) { return broadcast(weights[r * kTilePositions + j]); };
            const auto value = [&](int v) __attribute__((always_inline)) { return load(row + v * kLanes); };
            multiply_add(weight, value, sums);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(out + r * padded_dim + v * kLanes, sums[r][v]);
    }
}

// The blocks of one tile; only first .. last are set.
template <class T>
struct TileBlocks {
    int first, last;
    const T* keys[kTileBlocks];
    const T* values[kTileBlocks];
    const T* next_keys[kTileBlocks];  // what the next tile reads, or any address that is harmless to prefetch

    // What to fetch beside block b in this pass of `passes`: `wanted`, or what is in cache already.
    static const T* fetch(const T* wanted, const T* cached, int b, int pass, int passes) {
        return b * passes / kTileBlocks == pass ? wanted : cached;
    }
};

// The scores of blocks first .. last (within the tile). Where a pass is wider than that, it reads the first block again.
template <int R, bool kAhead, class T>
static void score_blocks(const float* q, const TileBlocks<T>& tile, int pass, int passes, int64_t head_dim, float* scores) {
    constexpr int kBlocks = kPassVectors<R> / kBlockVectors;
    for (int b = tile.first / kBlocks * kBlocks; b <= tile.last; b += kBlocks) {
        const T *keys[kBlocks], *ahead[kBlocks];
        for (int i = 0; i < kBlocks; ++i) {
            const int block = b + i < tile.first || b + i > tile.last ? tile.first : b + i;
            keys[i] = tile.keys[block];
            ahead[i] = tile.fetch(tile.values[block], tile.keys[block], block, pass, passes);
        }
        score_pass<R, kAhead>(q, keys, ahead, head_dim, scores + b * kBlockPositions);
    }
}

// All columns of out, in passes of kPassVectors and what remains of Dp in halves of it (Dp is a multiple of 16).
template <int R, bool kAhead, class T>
static void value_columns(const float* weights, const TileBlocks<T>& tile, int pass, int passes, int64_t padded_dim, int begin,
                          int end, float* out) {
    const T* ahead[kTileBlocks];
    for (int b = tile.first; b <= tile.last; ++b) ahead[b] = tile.fetch(tile.next_keys[b], tile.values[b], b, pass, passes);
    int64_t column = 0;
    const auto run = [&]<int kVectors>() __attribute__((always_inline)) {
        for (; column + kVectors * kLanes <= padded_dim; column += kVectors * kLanes) {
            value_pass<R, kVectors, kAhead>(weights, tile.values, ahead, column, padded_dim, begin, end, out + column);
        }
    };
    constexpr int kVectors = kPassVectors<R>;
    run.template operator()<kVectors>();
    if constexpr (kVectors / 2 >= kBlockVectors) run.template operator()<kVectors / 2>();
    if constexpr (kVectors / 4 >= kBlockVectors) run.template operator()<kVectors / 4>();
}

// From a number of rows to the code compiled for it.
template <bool kAhead, int R = kOnePassRows, class T>
static void score_rows(int rows, const float* q, const TileBlocks<T>& tile, int pass, int passes, int64_t head_dim,
                       float* scores) {
    if (rows == R) return score_blocks<R, kAhead>(q, tile, pass, passes, head_dim, scores);
    if constexpr (R > 1) score_rows<kAhead, R - 1>(rows, q, tile, pass, passes, head_dim, scores);
}

template <bool kAhead, int R = kOnePassRows, class T>
static void value_rows(int rows, const float* weights, const TileBlocks<T>& tile, int pass, int passes, int64_t padded_dim,
                       int begin, int end, float* out) {
    if (rows == R) return value_columns<R, kAhead>(weights, tile, pass, passes, padded_dim, begin, end, out);
    if constexpr (R > 1) value_rows<kAhead, R - 1>(rows, weights, tile, pass, passes, padded_dim, begin, end, out);
}

// ---------------------------------------------------------------------------------------------------------------------
// One tile
// ---------------------------------------------------------------------------------------------------------------------

// The working memory of one set of rows, cut from the caller's scratch.
struct AttentionScratch {
    float* q;             // [passes][D][kPackedRows], times scale
    float* scores;        // [rows][64]: scores, then weights
    float* out;           // [rows][Dp]: this partition
    float* max;           // [rows]
    float* sum;           // [rows]
    float* tile_max;      // [rows]
    float* total;         // [rows][partial_floats]: the partitions before
    float* wide_keys;     // [4][D][16]: a 16-bit tile in fp32
    float* wide_values;   // [4][16][Dp]
    int64_t position[kMaxQueryRows];
    int begin[kMaxQueryRows], end[kMaxQueryRows];  // the positions of the tile that a row sees; begin >= end: none
};

static AttentionScratch cut_scratch(const AttentionArgs& args, const QueryRows& rows, float* memory) {
    const KvView& kv = args.kv;
    const int64_t padded = kv.padded_dim(), group = args.group();
    AttentionScratch s;
    for (int row = 0; row < rows.rows; ++row) s.position[row] = rows.position(group, row);
    const auto take = [&memory](int64_t floats) {
        float* const taken = memory;
        memory += floats;
        return taken;
    };
    s.q = take(kMaxQueryRows / kPassRows * kPackedRows * padded);
    s.scores = take(kMaxQueryRows * kTilePositions);
    s.out = take(kMaxQueryRows * padded);
    s.max = take(kMaxQueryRows);
    s.sum = take(kMaxQueryRows);
    s.tile_max = take(kMaxQueryRows);
    s.total = take(kMaxQueryRows * (padded + kPartialOut));
    s.wide_keys = take(kTileBlocks * kv.k_head_elements());
    s.wide_values = take(kTileBlocks * kv.v_head_elements());
    return s;
}

// 2^x for x <= 0, NaN for NaN. 2^x = 2^n (1 + f P(f)) with n = round(x), |f| <= 1/2 exact; P is a minimax fit (2e-9 relative), and
// 2^n is an addition to the exponent. At -127 and below, the exponent and f end at nothing: exactly 0, without a comparison; from
// there to -126 the result is some number below the smallest normal one. A NaN converts to an integer that shifts to nothing.
PACE_INLINE F32 power_of_two_below_one(F32 x) {
    const F32 clamped = max(broadcast(-127.0f), x);  // x where x is NaN
    const I32 n = to_int(clamped);
    const F32 f = clamped - to_f32(n);
    F32 p = broadcast(1.53533605e-4f);
    p = fma(p, f, broadcast(1.339887502e-3f));
    p = fma(p, f, broadcast(9.618436918e-3f));
    p = fma(p, f, broadcast(5.550332367e-2f));
    p = fma(p, f, broadcast(2.402264774e-1f));
    p = fma(p, f, broadcast(6.931471825e-1f));
    p = fma(p, f, broadcast(1.0f));
    return from_bits(bits(p) + shift_left<23>(n));
}

PACE_INLINE float power_of_two_below_one(float x) {
    float lanes[kLanes];
    store(lanes, power_of_two_below_one(broadcast(x)));
    return lanes[0];
}

constexpr float kLog2E = 1.44269504f;

// The softmax of a tile is two loops over its rows, each short enough that the processor works on several rows at once; in one
// loop, every row waited for its own chain of maximum, exponential and sum, 300 to 400 cycles a row and tile.

// Caps the scores of a row, hides those outside [begin, end), whatever they are, and returns the largest.
static float finish_scores(float* scores, int begin, int end, float softcap) {
    constexpr int kVectors = kTilePositions / kLanes;
    const F32 minus_infinity = broadcast(-__builtin_inff());
    const bool partial = begin > 0 || end < kTilePositions;
    F32 s[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) s[v] = load(scores + v * kLanes);
    if (softcap != 0.0f || partial) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            if (softcap != 0.0f) s[v] = broadcast(softcap * kLog2E) * tanh(s[v] / broadcast(softcap));
            const F32 position = lane_numbers() + broadcast(float(v * kLanes));
            s[v] = select(less(position, broadcast(float(begin))), minus_infinity, s[v]);
            s[v] = select(less(position, broadcast(float(end))), s[v], minus_infinity);
            store(scores + v * kLanes, s[v]);
        }
    }
    // A NaN score is passed over, and shows in the sum. The maximum is exact in any order.
#pragma GCC unroll 16
    for (int step = kVectors / 2; step > 0; step /= 2) {
#pragma GCC unroll 16
        for (int v = 0; v < step; ++v) s[v] = max(s[v], max(s[v + step], minus_infinity));
    }
    return reduce_max(max(s[0], minus_infinity));
}

// Turns the scores of a row, times log2 e, into weights 2^(score - max) and brings the row's max, sum and out up to them.
static void soften_row(float* scores, float tile_max, float* max_seen, float* sum, float* out, int64_t padded_dim) {
    constexpr int kVectors = kTilePositions / kLanes;
    const float old_max = *max_seen;
    const float new_max = tile_max > old_max ? tile_max : old_max;
    // A row of scores of -infinity alone keeps weights of 0 instead of NaN.
    const F32 shift = broadcast(new_max == -__builtin_inff() ? 0.0f : new_max);
    F32 total = zero();
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
        const F32 weight = power_of_two_below_one(load(scores + v * kLanes) - shift);
        store(scores + v * kLanes, weight);
        total = total + weight;
    }
    if (new_max != old_max) {
        const float correction = power_of_two_below_one(old_max - new_max);  // 0 for the first tile
        *sum *= correction;
        for (int64_t d = 0; d < padded_dim; d += kLanes) store(out + d, load(out + d) * broadcast(correction));
        *max_seen = new_max;
    }
    *sum += reduce_add(total);
}

// Where passes begin when `rows` are spread evenly.
PACE_INLINE int count_passes(int rows) { return rows <= kOnePassRows ? 1 : (rows + kPassRows - 1) / kPassRows; }
PACE_INLINE int pass_begin(int rows, int pass) { return rows * pass / count_passes(rows); }

template <class T>
static void attend_blocks(const AttentionArgs& args, int rows, const TileBlocks<T>& tile, AttentionScratch& s) {
    const int64_t head_dim = args.kv.head_dim, padded = args.kv.padded_dim();
    const int passes = count_passes(rows);
    for (int pass = 0; pass < passes; ++pass) {
        const int row = pass_begin(rows, pass), count = pass_begin(rows, pass + 1) - row;
        const auto score = passes <= kFetchPasses ? score_rows<true, kOnePassRows, T> : score_rows<false, kOnePassRows, T>;
        score(count, s.q + pass * kPackedRows * head_dim, tile, pass, passes, head_dim, s.scores + row * kTilePositions);
    }
    const auto sees_any = [&](int row) { return s.begin[row] < s.end[row]; };
    for (int row = 0; row < rows; ++row) {
        if (sees_any(row)) s.tile_max[row] = finish_scores(s.scores + row * kTilePositions, s.begin[row], s.end[row], args.softcap);
    }
    for (int row = 0; row < rows; ++row) {
        if (sees_any(row)) soften_row(s.scores + row * kTilePositions, s.tile_max[row], s.max + row, s.sum + row, s.out + row * padded, padded);
    }
    for (int pass = 0; pass < passes; ++pass) {
        // Rows that see the same positions go together; on the diagonal and at the edge of a window each goes alone.
        int row = pass_begin(rows, pass);
        const int end = pass_begin(rows, pass + 1);
        while (row < end) {
            int next = row + 1;
            while (next < end && s.begin[next] == s.begin[row] && s.end[next] == s.end[row]) ++next;
            if (sees_any(row)) {
                const auto add = passes <= kFetchPasses ? value_rows<true, kOnePassRows, T> : value_rows<false, kOnePassRows, T>;
                add(next - row, s.scores + row * kTilePositions, tile, pass, passes, padded, s.begin[row], s.end[row],
                    s.out + row * padded);
            }
            row = next;
        }
    }
}

template <class T>
PACE_INLINE void widen(const T* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i));
}

// The tile that starts at `position`, of which the rows see blocks first .. last; row ranges are set. What is fetched ahead may
// belong to the next partition: most often the same thread computes it next.
template <class T>
static void attend_tile(const AttentionArgs& args, const QueryRows& rows, int64_t position, int first, int last,
                        AttentionScratch& s) {
    const KvView& kv = args.kv;
    const int64_t k_elements = kv.k_head_elements(), v_elements = kv.v_head_elements();
    const int32_t* const blocks = rows.blocks + position / kBlockPositions;
    TileBlocks<T> tile = {first, last, {}, {}, {}};
    for (int b = first; b <= last; ++b) {
        const bool has_next = position + kTilePositions + b * kBlockPositions <= s.position[rows.rows - 1];
        tile.keys[b] = kv.keys<const T>(blocks[b], rows.kv_head);
        tile.values[b] = kv.values<const T>(blocks[b], rows.kv_head);
        tile.next_keys[b] = has_next ? kv.keys<const T>(blocks[b + kTileBlocks], rows.kv_head) : tile.keys[b];
    }
    const bool widen_first = sizeof(T) == 2 && rows.rows > kFetchPasses * kPassRows;
    if (!widen_first) return attend_blocks(args, rows.rows, tile, s);

    TileBlocks<float> wide = {first, last, {}, {}, {}};
    for (int b = first; b <= last; ++b) {
        widen(tile.keys[b], k_elements, s.wide_keys + b * k_elements);
        widen(tile.values[b], v_elements, s.wide_values + b * v_elements);
        wide.keys[b] = wide.next_keys[b] = s.wide_keys + b * k_elements;
        wide.values[b] = s.wide_values + b * v_elements;
    }
    attend_blocks(args, rows.rows, wide, s);
}
