// Writes keys and values of new tokens to the block cache that attention reads.
//
// SHAPES      k, v [heads][D] of one token; one layer's blocks of keys [Hkv][D][16] and values [Hkv][16][Dp].
//
// DEFINITION  In int8, each head x [D] of k and of v has a scale = max|x| / 127, stored next to the head. The rounded
//             value is x[d] / scale. If all elements are zero, or so small that the scale is zero, the scale and the
//             codes are zero. If an element is not finite, the scale is NaN and the codes are zero. So everything
//             computed from it becomes NaN, as in the other dtypes.
//
// LAYOUT      A key becomes a column of its block, so that a block's scores are one product of 16 positions; a value
//             stays a row.
//
// NUMERICS    Rounded to nearest even in the cache's dtype. In int8 the error is at most half a scale: 1/254 of the
//             largest element of the head. Codes are clamped to -127..127; only a subnormal scale, itself rounded,
//             could exceed them.

// The largest magnitude of `count` elements; NaN if one is not finite.
static float largest_magnitude(const float* x, int64_t count) {
    F32 largest = zero(), spoilt = zero();
    for (int64_t d = 0; d < count; d += kLanes) {
        const F32 v = load_lanes(x + d, count - d < kLanes ? int(count - d) : kLanes);
        largest = max(abs(v), largest);   // skips NaN
        spoilt = fma(v, zero(), spoilt);  // NaN if v is not finite
    }
    return reduce_max(largest) + reduce_add(spoilt);
}

static float int8_scale(const float* x, int64_t count) { return largest_magnitude(x, count) / 127.0f; }

// x divided by its scale if T has scales, else x; storing it rounds it.
template <class T>
PACE_INLINE F32 over_scale(F32 x, float scale) {
    if constexpr (kScaleElements<T> == 0) {
        return x;
    } else {
        const F32 divisor = broadcast(scale), limited = max(broadcast(-127.0f), min(broadcast(127.0f), x / divisor));
        return select(less(zero(), divisor), limited, zero());
    }
}

// Stores a key in one column of its block, and a value in one row.
template <class T>
static void store_head(const float* k, const float* v, const KvView& kv, int64_t block, int64_t head, int64_t offset) {
    T* keys = kv.keys<T>(block, head) + offset;
    T* values = kv.values<T>(block, head) + offset * kv.padded_dim();
    float k_scale = 1.0f, v_scale = 1.0f;
    if constexpr (kScaleElements<T> > 0) {
        kv.key_scales(block, head)[offset] = k_scale = int8_scale(k, kv.key_dim);
        kv.value_scales(block, head)[offset] = v_scale = int8_scale(v, kv.value_dim);
    }
    for (int64_t d = 0; d < kv.key_dim; d += kLanes) {
        const int n = kv.key_dim - d < kLanes ? int(kv.key_dim - d) : kLanes;
        T column[kLanes];
        store(column, over_scale<T>(load_lanes(k + d, n), k_scale));
        for (int i = 0; i < n; ++i) keys[(d + i) * kBlockPositions] = column[i];
    }
    for (int64_t d = 0; d < kv.value_dim; d += kLanes) {
        const int n = kv.value_dim - d < kLanes ? int(kv.value_dim - d) : kLanes;
        store_lanes(values + d, over_scale<T>(load_lanes(v + d, n), v_scale), n);
    }
}

// Stores one token's keys and values at position `slot`, for the heads from first_head on.
template <class T>
static void store_kv_as(const float* k, int64_t k_head_stride, const float* v, int64_t v_head_stride, const KvView& kv,
                        int64_t first_head, int64_t heads, int64_t slot) {
    const int64_t block = slot / kBlockPositions, offset = slot % kBlockPositions;
    for (int64_t h = first_head; h < first_head + heads; ++h, k += k_head_stride, v += v_head_stride) {
        store_head<T>(k, v, kv, block, h, offset);
    }
}

static void store_kv(const float* k, int64_t k_head_stride, const float* v, int64_t v_head_stride, const KvView& kv,
                     int64_t first_head, int64_t heads, int64_t slot) {
    switch (kv.dtype) {
        case DType::F32:
            return store_kv_as<float>(k, k_head_stride, v, v_head_stride, kv, first_head, heads, slot);
        case DType::BF16:
            return store_kv_as<BF16>(k, k_head_stride, v, v_head_stride, kv, first_head, heads, slot);
        case DType::F16:
            return store_kv_as<F16>(k, k_head_stride, v, v_head_stride, kv, first_head, heads, slot);
        case DType::I8:
            return store_kv_as<int8_t>(k, k_head_stride, v, v_head_stride, kv, first_head, heads, slot);
    }
}
