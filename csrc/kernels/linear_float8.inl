// Matrix product of fp32 activations with weights of float8 codes, for a range of rows and panels.
//
// SHAPES      x: M rows of K fp32; weights: panels of 16 outputs, PanelF8 (pace/types.h). sums: [rows][panels * 16]
//             fp32.
//
// DEFINITION  for m: for n:  sum = 0
//                 for k ascending:  sum = fma(float8(W[n][k]) * ws[n][k / group], x[m][k], sum)
//                 sums[m][n] = sum
//
// LAYOUT      A panel's codes are [k][16] bytes; scales lie between them (pace/types.h).
//
// NUMERICS    A float8 has 4 bits and a group scale 11, so that a weight is exact in fp32. A row scale has 24 bits, so
//             the weight is rounded once. The rest is as in linear.inl: fp32, k ascending (level 0 rounds product and
//             sum).
//
// WHY THIS WAY  Decoding and scaling take about five instructions for each vector; a multiply-add is one. For many
//               rows, weights are decoded once, into a block [panel][k][16] of fp32 in the first-level cache;
//               linear_tile() multiplies that. One or two rows are multiplied while codes come from memory, by tiles of
//               several panels. The sums of one panel are too few to hide the latency of the multiply-adds.

constexpr int kFloat8Panels = kCachedPanels;
constexpr int64_t kFloat8K = 16 * 1024 / (16 * sizeof(float) * kFloat8Panels);  // k in a block

// Powers of two for a panel's rows, from their exponents.
PACE_INLINE void load_powers(const int8_t* exponents, F32* powers) {
    PACE_EACH(v, kVectors) powers[v] = power_of_two(to_int(load(exponents + v * kLanes)));
}

// Scales of group g of a panel in the form that load_float8() needs.
PACE_INLINE void load_float8_scales(const PackedHeader& h, int64_t panel, int64_t g, F32* scales) {
    if (h.group) {
        load_powers((const int8_t*)h.row_scales() + 16 * panel, scales);
        const F16* const place = (const F16*)(h.panel(panel) + h.scales_offset(g));
        PACE_EACH(v, kVectors) scales[v] = load(place + v * kLanes) * scales[v];
    } else {
        PACE_EACH(v, kVectors) scales[v] = load((const float*)h.row_scales() + 16 * panel + v * kLanes);
    }
    PACE_EACH(v, kVectors) scales[v] = scales[v] * broadcast(kFloat8Unit);
}

// ---- Few rows

constexpr int kFloat8FewRows = PACE_ISA_LEVEL == 0 ? 1 : 2;
constexpr int kFloat8FewPanels = PACE_ISA_LEVEL == 0 ? 1 : PACE_ISA_LEVEL == 1 ? 2 : 4;

// One tile: R rows x P panels.
template <int R, int P>
static void float8_tile(const PackedHeader& h, int64_t panel, const float* x, int64_t x_stride, float* sums,
                        int64_t sums_stride) {
    const int64_t group = h.group ? int64_t(h.group) : h.k, panel_bytes = h.panel_bytes();
    F32 sum[R][P * kVectors] = {};
    for (int64_t k = 0; k < h.k; k += group) {
        F32 scales[P * kVectors];
        PACE_EACH(p, P) load_float8_scales(h, panel + p, k / group, scales + p * kVectors);
        const uint8_t* codes = (const uint8_t*)h.panel(panel) + h.codes_offset(k);
        const int64_t count = h.k - k < group ? h.k - k : group;
        for (int64_t i = 0; i < count; ++i, codes += 16) {
            F32 weights[P * kVectors];
            PACE_EACH(p, P) {
                load_float8(codes + p * panel_bytes, weights + p * kVectors);
                __builtin_prefetch(codes + p * panel_bytes + 2048);
            }
            PACE_EACH(r, R) {
                const F32 input = broadcast(x[r * x_stride + k + i]);
                PACE_EACH(v, P * kVectors) sum[r][v] = fma(weights[v] * scales[v], input, sum[r][v]);
            }
        }
    }
    PACE_EACH(r, R)
        PACE_EACH(v, P * kVectors) store(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

template <int R = 1>
static void linear_float8_few(const QuantizedLinearArgs& a) {
    if constexpr (R < kFloat8FewRows)
        if (a.rows != R) return linear_float8_few<R + 1>(a);
    const int64_t x_stride = a.x_stride / int64_t(sizeof(float));
    int64_t p = 0;
    for (; p + kFloat8FewPanels <= a.panel_count; p += kFloat8FewPanels)
        float8_tile<R, kFloat8FewPanels>(*a.weight, a.first_panel + p, (const float*)a.x, x_stride, a.sums + 16 * p,
                                         a.sums_stride);
    for (; p < a.panel_count; ++p)
        float8_tile<R, 1>(*a.weight, a.first_panel + p, (const float*)a.x, x_stride, a.sums + 16 * p, a.sums_stride);
}

// ---- Many rows

// Decodes weights k..k+count of a panel to [count][16].
static void decode_float8(const PackedHeader& h, int64_t panel, int64_t k, int64_t count, float* out) {
    const int64_t group = h.group ? int64_t(h.group) : h.k_padded;
    for (const int64_t end = k + count; k < end;) {
        F32 scales[kVectors];
        load_float8_scales(h, panel, k / group, scales);
        const uint8_t* codes = (const uint8_t*)h.panel(panel) + h.codes_offset(k);
        const int64_t next = (k / group + 1) * group;
        for (; k < end && k < next; ++k, codes += 16, out += 16) {
            F32 values[kVectors];
            load_float8(codes, values);
            __builtin_prefetch(codes + 2048, 0, 3);
            PACE_EACH(v, kVectors) store(out + v * kLanes, values[v] * scales[v]);
        }
    }
}

template <int P, int R = 1>
static void float8_rows(int64_t rows, const float* x, int64_t x_stride, const float* w, int64_t count, float* sums,
                        int64_t sums_stride, bool first) {
    if constexpr (R < kManyRows)
        if (rows != R) return float8_rows<P, R + 1>(rows, x, x_stride, w, count, sums, sums_stride, first);
    linear_tile<WeightF32, R, P>(x, x_stride, w, 16 * kFloat8K, count, sums, sums_stride, first, {w, w});
}

static void linear_float8(const QuantizedLinearArgs& a) {
    if (a.rows <= kFloat8FewRows) return linear_float8_few(a);
    alignas(64) float block[kFloat8Panels * 16 * kFloat8K];
    const float* const x = (const float*)a.x;
    const int64_t x_stride = a.x_stride / int64_t(sizeof(float)), k_end = a.weight->k;
    for (int64_t panel = 0; panel < a.panel_count; panel += kFloat8Panels) {
        const int64_t panels = a.panel_count - panel < kFloat8Panels ? a.panel_count - panel : kFloat8Panels;
        for (int64_t k = 0; k < k_end; k += kFloat8K) {
            const int64_t count = k_end - k < kFloat8K ? k_end - k : kFloat8K;
            for (int64_t p = 0; p < panels; ++p)
                decode_float8(*a.weight, a.first_panel + panel + p, k, count, block + p * 16 * kFloat8K);
            for_tiles(a.rows, kManyRows, [&](int64_t row, int64_t rows) {
                float* const sums = a.sums + row * a.sums_stride + panel * 16;
                if (panels == kFloat8Panels)
                    float8_rows<kFloat8Panels>(rows, x + row * x_stride + k, x_stride, block, count, sums,
                                               a.sums_stride, k == 0);
                else
                    for (int64_t p = 0; p < panels; ++p)
                        float8_rows<1>(rows, x + row * x_stride + k, x_stride, block + p * 16 * kFloat8K, count,
                                       sums + p * 16, a.sums_stride, k == 0);
            });
        }
    }
}
