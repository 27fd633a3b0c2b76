// The two matrix products of attention over one tile of 64 positions; the tile itself is in attention.inl.
//
// SHAPES      R rows (<= 96) of D; a tile is four blocks of keys [D][16] and of values [16][Dp], Dp a multiple of 16.
//
// DEFINITION  scores[r][j] = sum_d q[r][d] k[d][j] * scale[j]   for positions of blocks first .. last; scales: int8
//             out[r][d]   += sum_j weights[r][j] v[j][d]            for positions j in [begin, end).
//
// LAYOUT      Both are small GEMMs with the same register tile, R x (vectors of 16 positions or of 16 d). Operand A is
//             broadcast. Operand B is loaded, and widened to fp32 if it is stored in fewer bits.
//
//               scores [R][64] = q  [D][R] transposed  x  keys   [D][16] per block
//               out    [R][Dp] += weights [R][64]       x  values [16][Dp] per block
//
//             All query heads of a group and all tokens of the rows share each load of a key or value.
//
// NUMERICS    fp32. A score is one chain of fma over d ascending, then multiplied by its scale. out is one chain of fma
//             over j ascending. The latent part of a score is one chain for each lane, over every kLanes-th element
//             ascending; the lanes are added in a fixed tree. bf16, fp16 and int8 widen exactly.
//
// Tile sizes: 6 rows x 2 vectors (AVX2) are 12 accumulators, 2 values and a broadcast in 16 registers. 6 x 4 (AVX-512)
// are 24 + 4 in 32, and 10 loads for 24 fma. Rows are spread evenly over passes (13 = 5 + 4 + 4). With one query head
// per row, a decode step of a wide group is bound by arithmetic as much as by memory. AVX-512 takes 7 and 8 rows at
// once, x 2: a 16-bit key is then fetched and widened once, not twice.

constexpr int kPassRows = kLanes == 4 ? 2 : 6;
constexpr int kOnePassRows = kLanes == 16 ? 8 : kPassRows;  // up to this many rows, one pass
static_assert(kOnePassRows <= kPackedRows);
constexpr int kBlockVectors = kBlockPositions / kLanes;
// With few rows, more columns provide enough independent chains.
template <int R>
constexpr int kPassVectors = kLanes == 16  ? (R <= 6 ? 4 : 2)
                             : kLanes == 8 ? (R <= 3 ? 4 : 2)
                                           : 4;

// sums[r][v] += scalar(r) * column(v). The shorter operand stays in registers and the other one streams through. 3 rows
// x 4 vectors on AVX2 are 12 sums, 3 scalars and a column in its 16 registers. 4 columns and a scalar would be one too
// many (g++ then keeps a sum in memory).
template <int R, int kVectors, class Scalar, class Column>
PACE_INLINE void multiply_add(const Scalar& scalar, const Column& column, F32 (&sums)[R][kVectors]) {
    if constexpr (kVectors <= R) {
        F32 columns[kVectors];
        PACE_EACH(v, kVectors) columns[v] = column(v);
        PACE_EACH(r, R) {
            const F32 a = scalar(r);
            PACE_EACH(v, kVectors) sums[r][v] = fma(a, columns[v], sums[r][v]);
        }
    } else {
        F32 scalars[R];
        PACE_EACH(r, R) scalars[r] = scalar(r);
        PACE_EACH(v, kVectors) {
            const F32 b = column(v);
            PACE_EACH(r, R) sums[r][v] = fma(scalars[r], b, sums[r][v]);
        }
    }
}

// Decode reads every key and value once, from blocks at arbitrary addresses. The hardware prefetcher restarts with each
// block, and the products would wait for memory half of the time. So while the scores of a tile are computed, its
// values and the keys of the next tile are prefetched. Each step fetches the same place of the other block, which is
// about as large. Two passes fetch half of the blocks each, which spreads the memory requests evenly. The target is the
// second-level cache, because the first one supports too few outstanding lines (benchmarks/RESULTS.md, "Decode
// attention at depth").
template <bool kAhead>
PACE_INLINE void fetch_ahead(const void* from, int64_t offset_bytes, int bytes) {
    if constexpr (kAhead) {
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + offset_bytes + i, 0, 2);
    }
}

// In int8, steps of kBytes are shorter than a cache line, so only every few steps fetch one.
template <bool kAhead, int kBytes>
PACE_INLINE void fetch_line_ahead(const int8_t* from, int64_t step) {
    constexpr int kSteps = 64 / kBytes;
    if (step % kSteps == 0) fetch_ahead<kAhead>(from, step * kBytes, 64);
}

// Fetches the scales behind `elements` of int8.
template <bool kAhead, class T>
PACE_INLINE void fetch_scales_ahead(const T* from, int64_t elements) {
    if constexpr (kScaleElements<T> > 0) fetch_ahead<kAhead>(from, elements, kScaleElements<T>);
}

// With more rows than two passes, a 16-bit or int8 tile is widened first, and the arithmetic hides the reads.
constexpr int kFetchPasses = 2;

// scores[r][0 .. 16 B) = sum_d q[d][r] * keys_b[d][16], for B blocks side by side. If scales_b[16] are not null, scores
// are multiplied by them. `ahead`: a block to prefetch for each block.
template <int R, bool kAhead, class T>
static void score_pass(const float* q, const T* const* keys, const float* const* scales, const T* const* ahead,
                       int64_t key_dim, float* scores) {
    constexpr int kVectors = kPassVectors<R>, kBlocks = kVectors / kBlockVectors;
    const T *k[kBlocks], *next[kBlocks];
    PACE_EACH(b, kBlocks) k[b] = keys[b], next[b] = ahead[b];
    F32 sums[R][kVectors];
    PACE_EACH(r, R) {
        PACE_EACH(v, kVectors) sums[r][v] = zero();
    }
    for (int64_t d = 0; d < key_dim; ++d) {
        const int64_t row_bytes = kBlockPositions * sizeof(T);
        PACE_EACH(b, kBlocks) {
            if constexpr (sizeof(T) == 1) {
                fetch_line_ahead<kAhead, kBlockPositions>(next[b], d);
            } else {
                fetch_ahead<kAhead>(next[b], d * row_bytes, row_bytes);
            }
        }
        const auto query = [&](int r) __attribute__((always_inline)) { return broadcast(q[d * kPackedRows + r]); };
        const auto key = [&](int v) __attribute__((always_inline)) {
            return load(k[v / kBlockVectors] + d * kBlockPositions + v % kBlockVectors * kLanes);
        };
        multiply_add(query, key, sums);
    }
    PACE_EACH(b, kBlocks) fetch_scales_ahead<kAhead>(next[b], key_dim * kBlockPositions);
    if (scales[0] != nullptr) {
        PACE_EACH(v, kVectors) {
            const F32 scale = load(scales[v / kBlockVectors] + v % kBlockVectors * kLanes);
            PACE_EACH(r, R) sums[r][v] = sums[r][v] * scale;
        }
    }
    PACE_EACH(r, R) {
        PACE_EACH(v, kVectors) store(scores + r * kTilePositions + v * kLanes, sums[r][v]);
    }
}

// out[r][0 .. kVectors * lanes) += sum_j weights[r][j] * values[j][...], over tile positions j in [begin, end).
template <int R, int kVectors, bool kAhead, class T>
static void value_pass(const float* weights, const T* const* values, const T* const* ahead, int64_t column,
                       int64_t padded_dim, int begin, int end, float* out) {
    F32 sums[R][kVectors];
    PACE_EACH(r, R) {
        PACE_EACH(v, kVectors) sums[r][v] = load(out + r * padded_dim + v * kLanes);
    }
    for (int block = begin / kBlockPositions; block * kBlockPositions < end; ++block) {
        const int block_begin = block * kBlockPositions, block_end = block_begin + kBlockPositions;
        const int first = begin > block_begin ? begin : block_begin, last = end < block_end ? end : block_end;
        const T* row = values[block] + (first - block_begin) * padded_dim + column;
        for (int j = first; j < last; ++j, row += padded_dim) {
            if constexpr (sizeof(T) == 1) {
                const int64_t steps_before = column / (kVectors * kLanes) * kBlockPositions;
                fetch_line_ahead<kAhead, kVectors * kLanes>(ahead[block], steps_before + j - block_begin);
            } else {
                const int64_t offset_bytes = (row - values[block]) * int64_t(sizeof(T));
                fetch_ahead<kAhead>(ahead[block], offset_bytes, kVectors * kLanes * sizeof(T));
            }
            const auto weight = [&](int r) __attribute__((always_inline)) {
                return broadcast(weights[r * kTilePositions + j]);
            };
            const auto value = [&](int v) __attribute__((always_inline)) { return load(row + v * kLanes); };
            multiply_add(weight, value, sums);
        }
    }
    PACE_EACH(r, R) {
        PACE_EACH(v, kVectors) store(out + r * padded_dim + v * kLanes, sums[r][v]);
    }
}

// The blocks of one tile; only first .. last are set.
template <class T>
struct TileBlocks {
    int first, last;
    const T* keys[kTileBlocks];
    const T* values[kTileBlocks];
    const T* next_keys[kTileBlocks];       // blocks of the next tile, or any address that may be prefetched
    const float* key_scales[kTileBlocks];  // for int8, also after widening, and for all blocks; else null
    const float* value_scales[kTileBlocks];
    const char* next_latents[kTileBlocks];  // blocks of the next tile, as stored, or null
    int64_t latent_bytes;                   // size of one latent

    // The address to prefetch next to block b in this pass of `passes`: `wanted`, or memory that is already cached.
    static const T* fetch(const T* wanted, const T* cached, int b, int pass, int passes) {
        return b * passes / kTileBlocks == pass ? wanted : cached;
    }
};

// scores[r][j] += sum_d q[r][d] * values[j][d], for the positions of blocks first .. last: the keys here are latent
// values. If scales are not null, the sums are multiplied by scales[j]. Values are stored position by position. So
// lanes are elements of a latent here, and are added up at the end. Each pass prefetches its part of the next tile's
// latents. A tile of many rows takes several times as long as reading it, but without prefetching it would still wait.
template <int R, class T>
static void latent_scores(const float* q, const TileBlocks<T>& tile, int pass, int passes, int64_t value_dim,
                          int64_t padded_dim, float* scores) {
    constexpr int kVectors = kPassVectors<R>;
    const int64_t whole = value_dim / kLanes * kLanes;
    for (int position = tile.first * kBlockPositions; position < (tile.last + 1) * kBlockPositions;
         position += kVectors) {
        const int block = position / kBlockPositions, offset = position % kBlockPositions;
        const T* const row = tile.values[block] + offset * padded_dim;
        if (tile.next_latents[block]) {
            const int64_t bytes = tile.latent_bytes, begin = bytes * pass / passes, end = bytes * (pass + 1) / passes;
            const char* const next = tile.next_latents[block] + offset * bytes;
            for (int v = 0; v < kVectors; ++v) {
                for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(next + v * bytes + i, 0, 2);
            }
        }
        F32 sums[R][kVectors];
        PACE_EACH(r, R) {
            PACE_EACH(v, kVectors) sums[r][v] = zero();
        }
        for (int64_t d = 0; d < whole; d += kLanes) {
            const auto query = [&](int r) __attribute__((always_inline)) { return load(q + r * padded_dim + d); };
            const auto latent = [&](int v) __attribute__((always_inline)) { return load(row + v * padded_dim + d); };
            multiply_add(query, latent, sums);
        }
        if (const int rest = int(value_dim - whole); rest > 0) {
            const auto query = [&](int r) __attribute__((always_inline)) {
                return load_partial(q + r * padded_dim + whole, rest);
            };
            const auto latent = [&](int v) __attribute__((always_inline)) {
                return load_partial(row + v * padded_dim + whole, rest);
            };
            multiply_add(query, latent, sums);
        }
        const float* const scales = tile.value_scales[block];
        PACE_EACH(r, R) {
            PACE_EACH(v, kVectors) {
                const float sum = reduce_add(sums[r][v]);
                scores[r * kTilePositions + position + v] += scales ? sum * scales[offset + v] : sum;
            }
        }
    }
}

// Computes the scores of blocks first .. last of the tile. If a pass is wider than that, it reads the first block
// again.
template <int R, bool kAhead, class T>
static void score_blocks(const float* q, const TileBlocks<T>& tile, int pass, int passes, int64_t key_dim,
                         float* scores) {
    constexpr int kBlocks = kPassVectors<R> / kBlockVectors;
    for (int b = tile.first / kBlocks * kBlocks; b <= tile.last; b += kBlocks) {
        const T *keys[kBlocks], *ahead[kBlocks];
        const float* scales[kBlocks];
        for (int i = 0; i < kBlocks; ++i) {
            const int block = b + i < tile.first || b + i > tile.last ? tile.first : b + i;
            keys[i] = tile.keys[block];
            scales[i] = tile.key_scales[block];
            ahead[i] = tile.fetch(tile.values[block], tile.keys[block], block, pass, passes);
        }
        score_pass<R, kAhead>(q, keys, scales, ahead, key_dim, scores + b * kBlockPositions);
    }
}

// All columns of out: passes of kPassVectors, then half of that for the rest of Dp (Dp is a multiple of 16).
template <int R, bool kAhead, class T>
static void value_columns(const float* weights, const TileBlocks<T>& tile, int pass, int passes, int64_t padded_dim,
                          int begin, int end, float* out) {
    const T* ahead[kTileBlocks];
    for (int b = tile.first; b <= tile.last; ++b)
        ahead[b] = tile.fetch(tile.next_keys[b], tile.values[b], b, pass, passes);
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
    for (int b = tile.first; b <= tile.last; ++b) fetch_scales_ahead<kAhead>(ahead[b], padded_dim * kBlockPositions);
}

// Dispatches a number of rows to the code compiled for it.
template <bool kAhead, int R = kOnePassRows, class T>
static void score_rows(int rows, const float* q, const TileBlocks<T>& tile, int pass, int passes, int64_t key_dim,
                       float* scores) {
    if (rows == R) return score_blocks<R, kAhead>(q, tile, pass, passes, key_dim, scores);
    if constexpr (R > 1) score_rows<kAhead, R - 1>(rows, q, tile, pass, passes, key_dim, scores);
}

template <int R = kOnePassRows, class T>
static void add_latent_scores(int rows, const float* q, const TileBlocks<T>& tile, int pass, int passes,
                              int64_t value_dim, int64_t padded_dim, float* scores) {
    if (rows == R) return latent_scores<R>(q, tile, pass, passes, value_dim, padded_dim, scores);
    if constexpr (R > 1) add_latent_scores<R - 1>(rows, q, tile, pass, passes, value_dim, padded_dim, scores);
}

template <bool kAhead, int R = kOnePassRows, class T>
static void value_rows(int rows, const float* weights, const TileBlocks<T>& tile, int pass, int passes,
                       int64_t padded_dim, int begin, int end, float* out) {
    if (rows == R) return value_columns<R, kAhead>(weights, tile, pass, passes, padded_dim, begin, end, out);
    if constexpr (R > 1) value_rows<kAhead, R - 1>(rows, weights, tile, pass, passes, padded_dim, begin, end, out);
}
