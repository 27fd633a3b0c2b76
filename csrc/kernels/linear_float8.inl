// Matrix product of fp32 activations with weights of float8 codes, for a range of rows and panels.
//
// SHAPES      x: M rows of K fp32; weights: panels of 16 outputs, PanelF8 (pace/types.h). sums: [rows][panels * 16] fp32.
//
// DEFINITION  for m: for n:  sum = 0
//                 for k ascending:  sum = fma(float8(W[n][k]) * ws[n][k / group], x[m][k], sum)
//                 sums[m][n] = sum
//
// LAYOUT      A panel's codes are [k][16] bytes; scales lie between them (pace/types.h).
//
// NUMERICS    A float8 has 4 bits and a scale of a group 11, so that a weight is exact in fp32; with one scale for the row, which has 24
//             bits, it is rounded once. The rest is linear.inl: fp32, k ascending (level 0 rounds product and sum).
//
// WHY THIS WAY  Decoding takes some eight instructions for each vector, against one for a multiply-add: it is done once for all rows, into
//             a block [panel][k][16] of fp32 that stays in the first-level cache, and linear_tile() multiplies that.

constexpr int kFloat8Panels = kCachedPanels;
constexpr int64_t kFloat8K = 16 * 1024 / (16 * sizeof(float) * kFloat8Panels);  // of a block

// Powers of two of a panel's rows, from their exponents.
PACE_INLINE void load_powers(const int8_t* exponents, F32* powers) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) powers[v] = power_of_two(to_int(load(exponents + v * kLanes)));
}

// Weights k..k+count of a panel, [count][16].
static void decode_float8(const PackedHeader& h, int64_t panel, int64_t k, int64_t count, float* out) {
    const char* const base = h.panel(panel);
    F32 row_scales[kVectors];
    if (h.group) {
        load_powers((const int8_t*)h.row_scales() + 16 * panel, row_scales);
    } else {
        for (int v = 0; v < kVectors; ++v) row_scales[v] = load((const float*)h.row_scales() + 16 * panel + v * kLanes);
    }
    const int64_t group = h.group ? int64_t(h.group) : h.k_padded;
    for (const int64_t end = k + count; k < end;) {
        F32 scales[kVectors];
        const F16* const place = (const F16*)(base + h.scales_offset(k / group));
        const uint8_t* codes = (const uint8_t*)base + h.codes_offset(k);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) scales[v] = h.group ? load(place + v * kLanes) * row_scales[v] : row_scales[v];
        const int64_t next = (k / group + 1) * group;
        for (; k < end && k < next; ++k, codes += 16, out += 16) {
            __builtin_prefetch(codes + 2048, 0, 3);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, load_float8(codes + v * kLanes) * scales[v]);
        }
    }
}

template <int P, int R = 1>
static void float8_rows(int64_t rows, const float* x, int64_t x_stride, const float* w, int64_t count, float* sums, int64_t sums_stride,
                        bool first) {
    if constexpr (R < kManyRows)
        if (rows != R) return float8_rows<P, R + 1>(rows, x, x_stride, w, count, sums, sums_stride, first);
    linear_tile<WeightF32, R, P>(x, x_stride, w, 16 * kFloat8K, count, sums, sums_stride, first);
}

static void linear_float8(const QuantizedLinearArgs& a) {
    alignas(64) float block[kFloat8Panels * 16 * kFloat8K];
    const float* const x = (const float*)a.x;
    const int64_t x_stride = a.x_stride / int64_t(sizeof(float)), k_end = a.weight->k, tiles = divide_up(a.rows, kManyRows);
    for (int64_t panel = 0; panel < a.panel_count; panel += kFloat8Panels) {
        const int64_t panels = a.panel_count - panel < kFloat8Panels ? a.panel_count - panel : kFloat8Panels;
        for (int64_t k = 0; k < k_end; k += kFloat8K) {
            const int64_t count = k_end - k < kFloat8K ? k_end - k : kFloat8K;
            for (int64_t p = 0; p < panels; ++p)
                decode_float8(*a.weight, a.first_panel + panel + p, k, count, block + p * 16 * kFloat8K);
            for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
                const int64_t rows = (a.rows - row + tiles - tile - 1) / (tiles - tile);
                float* const sums = a.sums + row * a.sums_stride + panel * 16;
                if (panels == kFloat8Panels)
                    float8_rows<kFloat8Panels>(rows, x + row * x_stride + k, x_stride, block, count, sums, a.sums_stride, k == 0);
                else
                    for (int64_t p = 0; p < panels; ++p)
                        float8_rows<1>(rows, x + row * x_stride + k, x_stride, block + p * 16 * kFloat8K, count, sums + p * 16,
                                       a.sums_stride, k == 0);
                row += rows;
            }
        }
    }
}
