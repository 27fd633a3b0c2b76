// Attention of a few query rows over the block cache: the same code for decode, prefill and everything between.
//
// SHAPES      R rows (<= 96) of D. Each block of 16 positions has keys [D][16] and values [16][Dp]; Dp is the width of
//             a value rounded up to 16.
//
// DEFINITION  For each row at position p, over the positions j in max(0, p - window + 1) .. p, or of its chunk up to p.
//             A row with a newest position sees up to that instead of p. One with an oldest position sees from there on,
//             if its window begins later:
//
//               s[j] = scale * sum_d q[d] k[d][j]               (softcap: s = c tanh(s / c)).
//               out[d] = sum_j exp(s[j] - max s) v[j][d] / sum_j exp(s[j] - max s).
//
//             A head with a slope (ALiBi) has s[j] += slope * (j - p), or scale * bf16(slope * bf16(j)).
//             A head with biases has s[j] += biases[R + d], where d is j - p limited to -R .. R.
//             int8: k[d][j] stands for k[d][j] * key_scale[j], v[j][d] for v[j][d] * value_scale[j].
//             Latents are values and keys at once: s[j] = scale * (sum_d q[d] k[d][j] + sum_d latent_q[d] v[j][d]).
//
// LAYOUT      A tile of 64 positions is four blocks; its two products are in attention_products.inl. int8 has one scale
//             for each position. Key scales multiply the 64 scores. Value scales multiply the 64 weights before the
//             product with the values.
//
// NUMERICS    fp32. A score is one chain of fma over d ascending. out is one chain of fma over j ascending within a
//             tile, scaled by 2^(old max - new max) between tiles. Scores are multiplied by log2 e, so that exp is a
//             power of two (2^x: 1.4 ulp). A bias is one fma: j - p is exact up to 2^24, so near positions have small
//             biases at any depth. Each partition of 1024 positions is computed independently; the results are
//             merged in order. int8 widens exactly; a complete score is multiplied by its scale, and a weight after it
//             was added to the sum of weights. Tiles and partitions begin at fixed absolute positions. So a row's bits
//             depend only on its oldest and newest visible position, the keys and values there, and the instruction
//             set. They do not depend on R, the span, the batch or the threads. Positions that a row does not see are
//             neither multiplied nor added, so NaN there has no effect.

// Working memory for one set of rows, allocated from the caller's scratch.
struct AttentionScratch {
    float* q;            // [passes][D][kPackedRows], times scale
    float* latent_q;     // [rows][Dp], times scale; only with latents
    float* scores;       // [rows][64]: scores, then weights
    float* out;          // [rows][Dp]: for this partition
    float* max;          // [rows]
    float* sum;          // [rows]
    float* tile_max;     // [rows]
    float* total;        // [rows][partial_floats]: merged state of the earlier partitions
    float* wide_keys;    // [4][D][16]: a 16-bit or int8 tile in fp32, without scales
    float* wide_values;  // [4][16][Dp]
    int64_t oldest[kMaxQueryRows], newest[kMaxQueryRows];  // the positions that each row sees
    int64_t first, last;                                   // the positions that any row sees
    int64_t tile;                                          // the first position of the tile
    int begin[kMaxQueryRows], end[kMaxQueryRows];  // the positions of the tile that each row sees; begin >= end: none
};

static AttentionScratch cut_scratch(const AttentionArgs& args, const QueryRows& rows, float* memory) {
    const KvView& kv = args.kv;
    const int64_t padded = kv.padded_dim(), group = args.group(), max_rows = args.max_rows();
    AttentionScratch s;
    s.last = 0;
    for (int row = 0; row < rows.rows; ++row) {
        s.oldest[row] = rows.oldest_of(args, row);
        s.newest[row] = rows.newest_of(group, row);
        if (s.newest[row] > s.last) s.last = s.newest[row];
    }
    s.first = rows.oldest_of_all(args);
    const auto take = [&memory](int64_t floats) {
        float* const taken = memory;
        memory += floats;
        return taken;
    };
    s.q = take(packed_query_floats(kv, max_rows / kPassRows));
    s.latent_q = take(args.latent_q ? max_rows * padded : 0);
    s.scores = take(max_rows * kTilePositions);
    s.out = take(max_rows * padded);
    s.max = take(max_rows);
    s.sum = take(max_rows);
    s.tile_max = take(max_rows);
    s.total = take(max_rows * (padded + kPartialOut));
    s.wide_keys = take(kTileBlocks * kv.k_head_elements());
    s.wide_values = take(kTileBlocks * kv.v_head_elements());
    return s;
}

// 2^x for x <= 0; NaN for NaN. 2^x = 2^n (1 + f P(f)) with n = round(x), |f| <= 1/2 exact. P is a minimax fit (2e-9
// relative), and 2^n is an addition to the exponent. At -127 and below, the exponent and f become zero, so the result
// is exactly 0 without a comparison. From there to -126 the result is some number below the smallest normal one. A NaN
// converts to an integer that shifts to zero.
PACE_INLINE F32 power_of_two_below_one(F32 x) {
    const F32 clamped = max(broadcast(-127.0f), x);  // x if x is NaN
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

PACE_INLINE F32 rounded_to_bf16(F32 x) {
    BF16 lanes[kLanes];
    store(lanes, x);
    return load(lanes);
}

// Adds the biases of its head to the scores of a row in the tile at `tile`, times log2 e. Only vectors that cross an
// edge of the table are gathered; others are adjacent elements, or all the same.
static void add_biases(const AttentionArgs& args, const QueryRows& rows, int row, int64_t tile, float* scores) {
    const int64_t group = args.group(), last = 2 * args.bias_radius;
    const float* const biases = args.biases + rows.head(group, row) * (last + 1);
    for (int i = 0; i < kTilePositions; i += kLanes) {
        const int64_t first = tile + i - rows.position(group, row) + args.bias_radius;
        F32 bias;
        if (first >= 0 && first + kLanes - 1 <= last) {
            bias = load(biases + first);
        } else if (first >= last) {
            bias = broadcast(biases[last]);
        } else if (first + kLanes - 1 <= 0) {
            bias = broadcast(biases[0]);
        } else {
            float lanes[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {
                const int64_t at = first + lane;
                lanes[lane] = biases[at < 0 ? 0 : at > last ? last : at];
            }
            bias = load(lanes);
        }
        store(scores + i, fma(broadcast(kLog2E), bias, load(scores + i)));
    }
}

// Adds the bias of its head's slope to the scores of a row in the tile at `tile`, times log2 e.
static void add_slope(const AttentionArgs& args, const QueryRows& rows, int row, int64_t tile, float* scores) {
    const float slope = args.slopes[rows.head(args.group(), row)];
    const int64_t origin = args.bf16_bias ? 0 : rows.position(args.group(), row);
    const float factor = args.bf16_bias ? args.scale * kLog2E : slope * kLog2E;
    for (int i = 0; i < kTilePositions; i += kLanes) {
        F32 bias = lane_numbers() + broadcast(float(tile - origin + i));
        if (args.bf16_bias) bias = rounded_to_bf16(broadcast(slope) * rounded_to_bf16(bias));
        store(scores + i, fma(broadcast(factor), bias, load(scores + i)));
    }
}

// The softmax of a tile is two loops over its rows, each short enough that the processor works on several rows at once.
// In a single loop, every row waited for its own chain of maximum, exponential and sum: 300 to 400 cycles per row and
// tile.

// Caps the scores of a row, sets those outside [begin, end) to -infinity, and returns the largest.
static float finish_scores(float* scores, int begin, int end, float softcap) {
    constexpr int kVectors = kTilePositions / kLanes;
    const F32 minus_infinity = broadcast(-__builtin_inff());
    const bool partial = begin > 0 || end < kTilePositions;
    F32 s[kVectors];
    PACE_EACH(v, kVectors) s[v] = load(scores + v * kLanes);
    if (softcap != 0.0f || partial) {
        PACE_EACH(v, kVectors) {
            if (softcap != 0.0f) s[v] = broadcast(softcap * kLog2E) * tanh(s[v] / broadcast(softcap));
            const F32 position = lane_numbers() + broadcast(float(v * kLanes));
            s[v] = select(less(position, broadcast(float(begin))), minus_infinity, s[v]);
            s[v] = select(less(position, broadcast(float(end))), s[v], minus_infinity);
            store(scores + v * kLanes, s[v]);
        }
    }
    // A NaN score is skipped here, and shows in the sum. The maximum is exact in any order.
#pragma GCC unroll 16
    for (int step = kVectors / 2; step > 0; step /= 2) {
        PACE_EACH(v, step) s[v] = max(s[v], max(s[v + step], minus_infinity));
    }
    return reduce_max(max(s[0], minus_infinity));
}

// Turns the scores of a row, times log2 e, into weights 2^(score - max), and updates the row's max, sum and out. With
// kScaled, the stored weights are multiplied by the value scales; the sum is not.
template <bool kScaled>
static void soften_row(float* scores, const float* const* scales, float tile_max, float* max_seen, float* sum,
                       float* out, int64_t padded_dim) {
    constexpr int kVectors = kTilePositions / kLanes;
    const float old_max = *max_seen;
    const float new_max = tile_max > old_max ? tile_max : old_max;
    // If all scores of a row are -infinity, weights are 0 instead of NaN.
    const F32 shift = broadcast(new_max == -__builtin_inff() ? 0.0f : new_max);
    F32 total = zero();
    PACE_EACH(v, kVectors) {
        const F32 weight = power_of_two_below_one(load(scores + v * kLanes) - shift);
        if constexpr (kScaled) {
            store(scores + v * kLanes, weight * load(scales[v / kBlockVectors] + v % kBlockVectors * kLanes));
        } else {
            store(scores + v * kLanes, weight);
        }
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

// Splits `rows` into passes of nearly equal size.
PACE_INLINE int count_passes(int rows) { return rows <= kOnePassRows ? 1 : (rows + kPassRows - 1) / kPassRows; }
PACE_INLINE int pass_begin(int rows, int pass) { return rows * pass / count_passes(rows); }

template <bool kScaled, class T>
static void attend_blocks(const AttentionArgs& args, const QueryRows& query_rows, const TileBlocks<T>& tile,
                          AttentionScratch& s) {
    const int rows = query_rows.rows;
    const int64_t key_dim = args.kv.key_dim, padded = args.kv.padded_dim();
    const int passes = count_passes(rows);
    for (int pass = 0; pass < passes; ++pass) {
        const int row = pass_begin(rows, pass), count = pass_begin(rows, pass + 1) - row;
        const auto score = passes <= kFetchPasses && !args.latent_q ? score_rows<true, kOnePassRows, T>
                                                                    : score_rows<false, kOnePassRows, T>;
        score(count, s.q + pass * kPackedRows * key_dim, tile, pass, passes, key_dim, s.scores + row * kTilePositions);
        if (args.latent_q) {
            add_latent_scores(count, s.latent_q + row * padded, tile, pass, passes, args.kv.value_dim, padded,
                              s.scores + row * kTilePositions);
        }
    }
    const auto sees_any = [&](int row) { return s.begin[row] < s.end[row]; };
    const auto add_to_scores = args.slopes ? add_slope : args.biases ? add_biases : nullptr;
    for (int row = 0; add_to_scores && row < rows; ++row) {
        if (sees_any(row)) add_to_scores(args, query_rows, row, s.tile, s.scores + row * kTilePositions);
    }
    for (int row = 0; row < rows; ++row) {
        if (sees_any(row))
            s.tile_max[row] = finish_scores(s.scores + row * kTilePositions, s.begin[row], s.end[row], args.softcap);
    }
    for (int row = 0; row < rows; ++row) {
        if (!sees_any(row)) continue;
        float *const scores = s.scores + row * kTilePositions, *const out = s.out + row * padded;
        soften_row<kScaled>(scores, tile.value_scales, s.tile_max[row], s.max + row, s.sum + row, out, padded);
    }
    for (int pass = 0; pass < passes; ++pass) {
        // Rows that see the same positions are computed together. On the diagonal and at the edge of a window each row
        // is computed separately.
        int row = pass_begin(rows, pass);
        const int end = pass_begin(rows, pass + 1);
        while (row < end) {
            int next = row + 1;
            while (next < end && s.begin[next] == s.begin[row] && s.end[next] == s.end[row]) ++next;
            if (sees_any(row)) {
                const auto add = passes <= kFetchPasses && !args.latent_q ? value_rows<true, kOnePassRows, T>
                                                                          : value_rows<false, kOnePassRows, T>;
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

// Processes the tile that starts at `position`. Its rows see blocks first .. last; row ranges are set. Prefetched
// blocks may belong to the next partition, which the same thread usually computes next.
template <class T>
static void attend_tile(const AttentionArgs& args, const QueryRows& rows, int64_t position, int first, int last,
                        AttentionScratch& s) {
    const KvView& kv = args.kv;
    const int64_t k_elements = kv.k_head_elements(), v_elements = kv.v_head_elements();
    const int32_t* const blocks = rows.blocks + position / kBlockPositions;
    TileBlocks<T> tile = {first, last, {}, {}, {}, {}, {}, {}, 0};
    for (int b = first; b <= last; ++b) {
        const bool has_next = position + kTilePositions + b * kBlockPositions <= s.last;
        tile.keys[b] = kv.keys<const T>(blocks[b], rows.kv_head);
        tile.values[b] = kv.values<const T>(blocks[b], rows.kv_head);
        tile.next_keys[b] = has_next ? kv.keys<const T>(blocks[b + kTileBlocks], rows.kv_head) : tile.keys[b];
        if (args.latent_q && has_next)
            tile.next_latents[b] =
                reinterpret_cast<const char*>(kv.values<const T>(blocks[b + kTileBlocks], rows.kv_head));
    }
    tile.latent_bytes = kv.padded_dim() * int64_t(sizeof(T));
    constexpr bool kScaled = kScaleElements<T> > 0;
    for (int b = 0; kScaled && b < kTileBlocks; ++b) {
        const int64_t block =
            blocks[b < first || b > last ? first : b];  // all are read; the scales of unseen blocks have no effect
        tile.key_scales[b] = kv.key_scales(block, rows.kv_head);
        tile.value_scales[b] = kv.value_scales(block, rows.kv_head);
    }
    const bool widen_first = sizeof(T) < sizeof(float) && rows.rows > kFetchPasses * kPassRows;
    if (!widen_first) return attend_blocks<kScaled>(args, rows, tile, s);

    TileBlocks<float> wide = {first, last, {}, {}, {}, {}, {}, {}, tile.latent_bytes};
    memcpy(wide.next_latents, tile.next_latents, sizeof wide.next_latents);
    memcpy(wide.key_scales, tile.key_scales, sizeof wide.key_scales);
    memcpy(wide.value_scales, tile.value_scales, sizeof wide.value_scales);
    for (int b = first; b <= last; ++b) {
        widen(tile.keys[b], k_elements, s.wide_keys + b * k_elements);
        widen(tile.values[b], v_elements, s.wide_values + b * v_elements);
        wide.keys[b] = wide.next_keys[b] = s.wide_keys + b * k_elements;
        wide.values[b] = s.wide_values + b * v_elements;
    }
    attend_blocks<kScaled>(args, rows, wide, s);
}
