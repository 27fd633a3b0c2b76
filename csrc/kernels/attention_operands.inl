// How the two products of attention multiply: the vectors that they load, and how one instruction adds up. A kind P of
// products has
//
//   Element, Latent          the type of keys and values in a tile, and that of values that are keys as well.
//
//   Staged                   the kind for a tile that stage() has brought into the order of products, for many rows.
//
//   kStep                    elements of d, or positions, that one product adds up.
//
//   kWords                   words of 32 bits that a step of d takes in the packed queries.
//
//   Sum                      of products; kSums vectors. multiply(sum, query, key) and (sum, weight, value) add to it.
//
//   begin_score(), score()   the sum of a score without any products; the score of a sum.
//
//   begin(), end()           from out to a sum of values, and back.
//
//   kWholeTiles              positions that a row does not see have weights of zero and may be multiplied.
//
//   value<n>()               vector v of n side by side; even n share loads.
//
// SHAPES      A pass packs R <= kPackedRows queries. A row of scores is 64 floats; its weights replace it there.
//
// DEFINITION  FloatProducts   fp32: keys and values widen exactly. One fma for each element.
//
//             PairProducts    bf16 caches of tables with vdpbf16ps. Queries (times scale) and weights are rounded to
//                             bf16. sum = (sum + a1 b1) + a0 b0 for elements 2i, 2i + 1 of d, or positions 2i, 2i + 1.
//                             The sum of weights is that of the rounded ones, so that out is an average of values.
//
//             CodeProducts    int8 caches of tables with vpdpbusd. A query (times scale) is codes of 16 bits.
//                             n = round(x / unit), unit = max|x| / 32512. So are the weights of a row in a tile, times
//                             their value scales. n = round(32512 w / max w). Products are exact integers.
//
// LAYOUT      A code n = 256 high + low is two bytes. Queries have low in -128..127. Keys are made unsigned by adding
//             128, so sums begin at -128 * (sum of n). Weights are unsigned themselves.
//
//               packed queries   float [D][8]     pairs [D/2][8]     quads [D/4][2][8] (high, low), units, beginnings.
//
//               row of weights   float [64]       pairs [32]         low [64], high [64], then max w as a float.
//
//               staged keys      float [D][16]    pairs [D/2][16]    quads [D/4][16], unsigned.
//
//               staged values    float [16][Dp]   pairs [8][Dp]      quads [4][Dp].
//
// NUMERICS    Rounding to bf16 is off by at most 2^-9 of a number, and codes by 2^-16 of the largest one. That is less
//             than bf16 of `transformers`, which also rounds scores. A code's product with 127 over 512 elements is
//             less than 2^31. Pairs and quads begin at fixed positions. Those that a row does not see become zeros
//             (bf16), or have weights of zero (int8: no code is NaN). So they have no influence.

constexpr int kBlockVectors = kBlockPositions / kLanes, kTileVectors = kTilePositions / kLanes;

template <class T, bool scaled = (kScaleElements<T> > 0)>
struct FloatProducts {
    using Element = T;
    using Latent = T;
    using Staged = FloatProducts<float, scaled>;
    using Sum = F32;
    static constexpr bool kStaged = scaled && std::is_same_v<T, float>, kScaled = scaled;
    static constexpr bool kWholeTiles = false, kHasLatents = true;
    static constexpr int kStep = 1, kWords = kPackedRows, kSums = 1;

    PACE_INLINE void multiply(F32& sum, F32 a, F32 b) { sum = fma(a, b, sum); }
    PACE_INLINE F32 query(const float* q, int r) { return broadcast(q[r]); }
    PACE_INLINE F32 key(const T* keys, int v) { return load(keys + v * kLanes); }
    PACE_INLINE F32 weight(const float* weights, int j) { return broadcast(weights[j]); }
    template <int kVectors>
    PACE_INLINE F32 value(const T* row, int64_t, int v) {
        return load(row + v * kLanes);
    }
    PACE_INLINE F32 begin_score(const float*, int) { return zero(); }
    PACE_INLINE F32 score(F32 sum, const float*, int) { return sum; }
    PACE_INLINE F32 begin(const float* out) { return load(out); }
    PACE_INLINE F32 end(F32 sum, const float*, const float*) { return sum; }

    static void pack(const float* q, int64_t dim, float scale, float* packed, int row) {
        for (int64_t d = 0; d < dim; ++d) packed[d * kPackedRows + row] = q[d] * scale;
    }

    // Stores the weights of a row, times value scales if there are any, and returns the sum of weights in each lane.
    PACE_INLINE F32 store_weights(const F32* weights, const float* const* scales, int, int, float* row) {
        F32 total = zero();
        PACE_EACH(v, kTileVectors) {
            const F32 weight = weights[v];
            if constexpr (scaled) {
                store(row + v * kLanes, weight * load(scales[v / kBlockVectors] + v % kBlockVectors * kLanes));
            } else {
                store(row + v * kLanes, weight);
            }
            total = total + weight;
        }
        return total;
    }

    static void stage(const T* keys, const T* values, int64_t key_dim, int64_t padded_dim, float* wide_keys,
                      float* wide_values) {
        for (int64_t i = 0; i < key_dim * kBlockPositions; i += kLanes) store(wide_keys + i, load(keys + i));
        for (int64_t i = 0; i < padded_dim * kBlockPositions; i += kLanes) store(wide_values + i, load(values + i));
    }

    // ---- Latents: lanes are elements.
    static constexpr int kLatentLanes = kLanes;
    PACE_INLINE F32 latent_query(const float* q, int64_t at, int n) { return load_lanes(q + at, n); }
    PACE_INLINE F32 latent(const T* values, int n) { return load_lanes(values, n); }
    static void pack_latent(const float* q, int64_t dim, float scale, float* packed) {
        for (int64_t d = 0; d < dim; ++d) packed[d] = q[d] * scale;
    }
};

#if PACE_ISA_LEVEL >= 4
struct StagedPair {
    BF16 first, second;
};

template <class T>
struct PairProducts {
    using Element = T;
    using Latent = BF16;
    using Staged = PairProducts<StagedPair>;
    using Sum = F32;
    static constexpr bool kStaged = std::is_same_v<T, StagedPair>, kScaled = false, kWholeTiles = false;
    static constexpr bool kHasLatents = true;
    static constexpr int kStep = 2, kWords = kPackedRows, kSums = 1;

    PACE_INLINE void multiply(F32& sum, Pairs a, Pairs b) { sum = dot_pairs(a, b, sum); }
    PACE_INLINE Pairs query(const float* q, int r) { return broadcast_pair((const BF16*)(q + r)); }
    // Pairs of rows of a block: both, or its last one and zeros.
    template <int kRows = 2>
    PACE_INLINE Pairs key(const T* keys, int v) {
        if constexpr (kStaged) {
            return load_pairs((const BF16*)(keys + v * kLanes));
        } else {
            return load_pair_rows<kRows>(keys + v * kLanes);
        }
    }
    PACE_INLINE Pairs weight(const float* weights, int j) { return broadcast_pair((const BF16*)weights + j); }
    template <int kVectors>
    PACE_INLINE Pairs value(const T* row, int64_t stride, int v) {
        if constexpr (kStaged) {
            return load_pairs((const BF16*)(row + v * kLanes));
        } else if constexpr (kVectors % 2 == 0) {
            return load_pair_half(row + v / 2 * 2 * kLanes, row + stride + v / 2 * 2 * kLanes, v % 2);
        } else {
            return load_pair_rows(row + v * kLanes, row + stride + v * kLanes);
        }
    }
    // The halves of pairs whose positions j and j + 1 a row sees, begin .. end - 1.
    PACE_INLINE I32 seen(int j, int begin, int end) {
        return broadcast_int(int32_t((j >= begin ? 0xffffu : 0u) | (j + 1 < end ? 0xffff0000u : 0u)));
    }
    PACE_INLINE F32 begin_score(const float*, int) { return zero(); }
    PACE_INLINE F32 score(F32 sum, const float*, int) { return sum; }
    PACE_INLINE F32 begin(const float* out) { return load(out); }
    PACE_INLINE F32 end(F32 sum, const float*, const float*) { return sum; }

    static void pack(const float* q, int64_t dim, float scale, float* packed, int row) {
        packed += row;
        for (int64_t d = 0; d < dim; d += kLanes) {
            BF16 rounded[kLanes];  // zeros behind the last one
            store(rounded, load_lanes(q + d, dim - d < kLanes ? int(dim - d) : kLanes) * broadcast(scale));
            for (int i = 0; i < kLanes && d + i < dim; i += kStep, packed += kWords)
                memcpy(packed, rounded + i, sizeof *packed);
        }
    }

    PACE_INLINE F32 store_weights(const F32* weights, const float* const*, int, int, float* row) {
        F32 total = zero();
        PACE_EACH(v, kTileVectors / 2) {
            const Pairs pairs = round_pairs(weights[2 * v], weights[2 * v + 1]);
            store_pairs(row + v * kLanes, pairs);
            total = total + (evens(pairs) + odds(pairs));
        }
        return total;
    }

    static void stage(const T* keys, const T* values, int64_t key_dim, int64_t padded_dim, float* wide_keys,
                      float* wide_values) {
        int64_t d = 0;
        for (; d + 1 < key_dim; d += 2, wide_keys += kLanes) store_pairs(wide_keys, key<2>(keys + d * kLanes, 0));
        if (d < key_dim) store_pairs(wide_keys, key<1>(keys + d * kLanes, 0));
        for (int j = 0; j < kBlockPositions; j += 2, wide_values += padded_dim) {
            const T* const row = values + j * padded_dim;
            for (int64_t at = 0; at < padded_dim; at += kLanes)
                store_pairs(wide_values + at, load_pair_rows(row + at, row + padded_dim + at));
        }
    }

    // ---- Latents: a lane is a pair of elements, as they are stored.
    static constexpr int kLatentLanes = 2 * kLanes;
    PACE_INLINE Pairs latent_query(const float* q, int64_t at, int n) { return latent((const BF16*)q + at, n); }
    PACE_INLINE Pairs latent(const BF16* values, int n) {
        return n == kLatentLanes ? load_pairs(values) : load_pairs_partial(values, n);
    }
    static void pack_latent(const float* q, int64_t dim, float scale, float* packed) {
        for (int64_t d = 0; d < dim; d += kLanes) {
            const int n = dim - d < kLanes ? int(dim - d) : kLanes;
            store_lanes((BF16*)packed + d, load_lanes(q + d, n) * broadcast(scale), n);
        }
    }
};
using BF16Products = PairProducts<BF16>;
#else
using BF16Products = FloatProducts<BF16>;
#endif

#if PACE_HAS_QUADS
struct StagedQuad {
    int8_t codes[4];
};

template <class T>
struct CodeProducts {
    using Element = T;
    using Latent = int8_t;
    using Staged = CodeProducts<StagedQuad>;
    static constexpr bool kStaged = std::is_same_v<T, StagedQuad>, kScaled = true, kWholeTiles = true;
    static constexpr bool kHasLatents = false;
    static constexpr int kStep = 4, kWords = 2 * kPackedRows, kSums = 2;
    static constexpr float kMaxCode = 32512.0f;            // 127 * 256
    static constexpr int kMaxWeight = kTilePositions / 2;  // word of a row of weights with max w

    struct Sum {
        I32 high, low;
    };
    struct Query {
        Bytes high, low;
    };
    struct Weight {
        Bytes high, low;
    };
    struct Key {
        Factor codes;
    };
    struct Value {
        Bytes codes;
    };

    PACE_INLINE void multiply(Sum& sum, Query q, Key k) {
        sum.high = dot(sum.high, k.codes, q.high);
        sum.low = dot(sum.low, k.codes, q.low);
    }
    PACE_INLINE void multiply(Sum& sum, Weight w, Value v) {
        sum.high = dot(sum.high, w.high, v.codes);
        sum.low = dot(sum.low, w.low, v.codes);
    }
    PACE_INLINE Bytes broadcast_quad(const void* p) { return broadcast_input((const int8_t*)p); }

    PACE_INLINE Query query(const float* q, int r) {
        return {broadcast_quad(q + r), broadcast_quad(q + kPackedRows + r)};
    }
    PACE_INLINE Key key(const T* keys, int v) {
        if constexpr (kStaged) {
            return {load_bytes(keys + v * kLanes)};
        } else {
            return {of_signed(load_quad_rows(keys + v * kLanes, kBlockPositions))};
        }
    }
    PACE_INLINE Weight weight(const float* weights, int j) {
        const uint8_t* const low = (const uint8_t*)weights;
        return {broadcast_quad(low + kTilePositions + j), broadcast_quad(low + j)};
    }
    template <int kVectors>
    PACE_INLINE Value value(const T* row, int64_t stride, int v) {
        if constexpr (kStaged) {
            return {load_bytes(row + v * kLanes)};
        } else if constexpr (kVectors % 2 == 0) {
            return {load_quad_half(row + v / 2 * 2 * kLanes, stride, v % 2)};
        } else {
            return {load_quad_rows(row + v * kLanes, stride)};
        }
    }
    PACE_INLINE I32 total(Sum sum) { return shift_left<8>(sum.high) + sum.low; }

    // `units`: what the packed queries have behind the last step. Sums may overflow on the way to their totals.
    PACE_INLINE Sum begin_score(const float* units, int r) {
        int32_t surplus;
        memcpy(&surplus, units + kPackedRows + r, sizeof surplus);
        return {broadcast_int(0), broadcast_int(surplus)};
    }
    PACE_INLINE F32 score(Sum sum, const float* units, int r) { return to_f32(total(sum)) * broadcast(units[r]); }
    PACE_INLINE Sum begin(const float*) { return {broadcast_int(0), broadcast_int(0)}; }
    PACE_INLINE F32 end(Sum sum, const float* weights, const float* out) {
        return fma(to_f32(total(sum)) * broadcast(1.0f / kMaxCode), broadcast(weights[kMaxWeight]), load(out));
    }

    static void pack(const float* q, int64_t dim, float scale, float* packed, int row) {
        const int64_t steps = divide_up(dim, kStep);
        float* const units = packed + steps * kWords;
        const float unit = largest_magnitude(q, dim) * scale / kMaxCode;
        I32 sum_of_codes = broadcast_int(0);
        packed += row;
        for (int64_t d = 0; d < dim; d += kLanes) {
            const F32 x = load_lanes(q + d, dim - d < kLanes ? int(dim - d) : kLanes) * broadcast(scale);
            const F32 limited = max(broadcast(-kMaxCode), min(broadcast(kMaxCode), x / broadcast(unit)));
            const I32 code = to_int(select(less(zero(), broadcast(unit)), limited, zero()));
            uint8_t high[kLanes], low[kLanes];  // zeros behind the last one
            store_bytes_of(low, code);
            store_bytes_of(high, shift_right<8>(code + broadcast_int(128)));
            for (int i = 0; i < kLanes && d + i < dim; i += kStep, packed += kWords) {
                memcpy(packed, high + i, sizeof *packed);
                memcpy(packed + kPackedRows, low + i, sizeof *packed);
            }
            sum_of_codes = sum_of_codes + code;
        }
        int32_t codes[kLanes], surplus = 0;
        memcpy(codes, &sum_of_codes, sizeof codes);
        for (int i = 0; i < kLanes; ++i) surplus -= kSignedOffset * codes[i];
        units[row] = unit;
        memcpy(units + kPackedRows + row, &surplus, sizeof surplus);
    }

    // Positions outside of [begin, end) have weights of zero, also with scales of NaN. A scale of NaN that the row sees
    // makes the sum of weights NaN.
    PACE_INLINE F32 store_weights(const F32* weights, const float* const* scales, int begin, int end, float* row) {
        const bool partial = begin > 0 || end < kTilePositions;
        F32 total = zero(), largest = zero(), scaled[kTileVectors];
        PACE_EACH(v, kTileVectors) {
            scaled[v] = weights[v] * load(scales[v / kBlockVectors] + v % kBlockVectors * kLanes);
            if (partial) {
                const F32 position = lane_numbers() + broadcast(float(v * kLanes));
                scaled[v] = select(less(position, broadcast(float(begin))), zero(), scaled[v]);
                scaled[v] = select(less(position, broadcast(float(end))), scaled[v], zero());
            }
            total = fma(scaled[v], zero(), total + weights[v]);
            largest = max(scaled[v], largest);
        }
        const float max_weight = reduce_max(largest);
        const float inverse = max_weight < 0x1p-126f ? 0.0f : 1.0f / max_weight;
        I32 codes[kTileVectors];
        PACE_EACH(v, kTileVectors) codes[v] = to_int(scaled[v] * broadcast(inverse) * broadcast(kMaxCode));
        store_both_bytes((uint8_t*)row, codes);
        row[kMaxWeight] = max_weight;
        return total;
    }

    static void stage(const T* keys, const T* values, int64_t key_dim, int64_t padded_dim, float* wide_keys,
                      float* wide_values) {
        for (int64_t d = 0; d < key_dim; d += kStep, wide_keys += kLanes)
            store_bytes(wide_keys, of_signed(load_quad_rows(keys + d * kLanes, kBlockPositions)));
        for (int j = 0; j < kBlockPositions; j += kStep, wide_values += padded_dim) {
            const T* const row = values + j * padded_dim;
            for (int64_t at = 0; at < padded_dim; at += kLanes)
                store_bytes(wide_values + at, load_quad_rows(row + at, padded_dim));
        }
    }
};
#endif

// Calls f<P>() for the kind that multiplies a cache. Latents in int8 are multiplied in fp32 by every table.
template <class F>
PACE_INLINE void with_products(const AttentionArgs& args, const F& f) {
    switch (args.kv.dtype) {
        case DType::F32:
            return f.template operator()<FloatProducts<float>>();
        case DType::BF16:
            return f.template operator()<BF16Products>();
        case DType::F16:
            return f.template operator()<FloatProducts<F16>>();
        case DType::I8:
#if PACE_HAS_QUADS
            if (!args.latent_q) return f.template operator()<CodeProducts<int8_t>>();
#endif
            return f.template operator()<FloatProducts<int8_t>>();
    }
}
