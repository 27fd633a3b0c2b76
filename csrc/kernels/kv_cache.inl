// Keys and values of new tokens into the block cache that attention reads.
//
// SHAPES      k, v [heads][D] of one token; one layer's blocks of keys [Hkv][D][16] and values [Hkv][16][Dp]
// LAYOUT      A key becomes a column of its block, so that a block's scores are one product of 16 positions; a value stays a row.
// NUMERICS    Rounded to nearest even in the cache's dtype.

// One token's keys and values into position `slot` of the heads from first_head on, rounded to nearest even.
template <class T>
static void store_kv_as(const float* k, int64_t k_head_stride, const float* v, int64_t v_head_stride, const KvView& kv,
                        int64_t first_head, int64_t heads, int64_t slot) {
    const int64_t block = slot / kBlockPositions, offset = slot % kBlockPositions;
    for (int64_t h = first_head; h < first_head + heads; ++h, k += k_head_stride, v += v_head_stride) {
        T* keys = kv.keys<T>(block, h) + offset;
        T* values = kv.values<T>(block, h) + offset * kv.padded_dim();
        for (int64_t d = 0; d < kv.head_dim; d += kLanes) {
            const int n = kv.head_dim - d < kLanes ? int(kv.head_dim - d) : kLanes;
            T column[kLanes];
            store(column, load_lanes(k + d, n));
            for (int i = 0; i < n; ++i) keys[(d + i) * kBlockPositions] = column[i];
            store_lanes(values + d, load_lanes(v + d, n), n);
        }
    }
}

static void store_kv(const float* k, int64_t k_head_stride, const float* v, int64_t v_head_stride, const KvView& kv,
                     int64_t first_head, int64_t heads, int64_t slot) {
    switch (kv.dtype) {
        case DType::F32: return store_kv_as<float>(k, k_head_stride, v, v_head_stride, kv, first_head, heads, slot);
        case DType::BF16: return store_kv_as<BF16>(k, k_head_stride, v, v_head_stride, kv, first_head, heads, slot);
        case DType::F16: return store_kv_as<F16>(k, k_head_stride, v, v_head_stride, kv, first_head, heads, slot);
    }
}
