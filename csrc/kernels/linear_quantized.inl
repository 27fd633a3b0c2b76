// Matrix product of quantised activations with weights of int8 or 4-bit codes, for a range of rows and panels.
//
// SHAPES      x: M rows as quantize_input() leaves them: codes xc, and for each group of G inputs a scale xs and the sum of its codes;
//             weights: panels of 16 outputs, PanelI8 or PanelU4 (pace/types.h). sums: [rows][panels * 16] fp32, for linear_epilogue().
//             G divides the weight's group (128 where a whole row has one scale), so that a group of inputs has one scale ws and, in
//             weights with minima, one minimum wm.
//
// DEFINITION  for m: for n:  sum = 0
//                 for g ascending:  dot = the sum over k in g of level(W[n][k]) * xc[m][k]          in integers
//                                   sum = fma(dot, ws[n][g] * xs[m][g], sum)
//                                   sum = fma(wm[n][g] * xs[m][g], sum of xc[m][k] over k in g, sum)       with minima
//                 sums[m][n] = sum
//             level(c) = c for int8; levels[c] of the header for 4 bits.
//
// LAYOUT      One step of a panel is 64 bytes, 4 for each output n, and every table reads the same ones:
//
//               PanelI8   k..k+3    [ n0: k k+1 k+2 k+3 | n1: k k+1 k+2 k+3 | ... | n15 ]
//               PanelU4   k..k+7    the same places; low nibbles are k..k+3, high ones k+4..k+7
//
//             Four k of an output share a 32-bit lane, because that is what the instructions of vec_bytes.inl add up; their four inputs
//             are one broadcast. Before the codes of every two groups lie their scales, and their minima (pace/types.h).
//
// NUMERICS    dot is exact whatever the codes: |dot| <= 128 * 128 * 127 < 2^24, so its fp32 is exact too. ws is exact (F16 times a power
//             of two, or fp32); ws * xs and wm * xs are rounded, and each fma once, on level 0 too. So the bits are the same on every
//             table, and for every tile, chunk and thread: row determinism.
//
// WHY THESE SIZES
//   A tile is R rows x P panels: R * P * kVectors sums of integers, and as many of fp32, which a group's end alone needs. Decoded codes
//   serve R rows, a broadcast serves P panels.
//     generic  2 rows x 1 panel   16 sums of pairs: some are in memory whatever we do
//     avx2     4 rows x 1 panel   (8 sums, 4 halves of weights, 2 of an input, a product: 15 of 16 registers)
//     avx512   6 rows x 2 panels  (12 sums, and 12 in fp32, 4 weights, input: 29 of 32 registers)
//   Up to kQuantizedRows rows, weights come from memory and pass by once, one panel at a time: see linear.inl.
//   K blocks keep a tile's weights, 16 KB, in the first-level cache while all rows pass over them (amx: linear_quantized_amx.inl).

// Rows of a tile, and its panels where it finds its weights in cache.
constexpr int kQuantizedRows = PACE_ISA_LEVEL == 0 ? 2 : PACE_ISA_LEVEL == 1 ? 4 : 6;
constexpr int kQuantizedPanels = PACE_ISA_LEVEL <= 1 ? 1 : 2;
// How far ahead of a tile weights are asked for, where they come from memory.
constexpr int kPrefetchBytes = 4096;

// ---- How each kind of code multiplies: a step is 64 bytes of a panel; each vector of them makes kFactors weights, of four k.

struct CodesI8 {
    static constexpr int kStep = 4, kFactors = 1, kSumK = kInputGroup;
    using Weight = Factor;
    using Input = FactorInput;
    using Sum = SignedSum;
    explicit CodesI8(const PackedHeader&) {}
    PACE_INLINE void decode(const CodesI8&, const uint8_t* p, Factor* w) { w[0] = of_signed(load_bytes(p)); }
};

struct CodesU4Levels {
    static constexpr int kStep = 8, kFactors = 2, kSumK = kInputGroup;
    using Weight = Factor;
    using Input = FactorInput;
    using Sum = SignedSum;
    const Lookup levels;
    explicit CodesU4Levels(const PackedHeader& h) : levels(h.levels) {}
    PACE_INLINE void decode(const CodesU4Levels& codes, const uint8_t* p, Factor* w) {
        const Bytes both = load_bytes(p);
        w[0] = of_signed(codes.levels(low_nibbles(both)));
        w[1] = of_signed(codes.levels(high_nibbles(both)));
    }
};

// Levels of c - 8.
struct CodesU4 {
    static constexpr int kStep = 8, kFactors = 2, kSumK = kNibbleSumK;
    using Weight = Nibbles;
    using Input = NibblesInput;
    using Sum = NibbleSum;
    explicit CodesU4(const PackedHeader&) {}
    PACE_INLINE void decode(const CodesU4&, const uint8_t* p, Nibbles* w) {
        const Bytes both = load_bytes(p);
        w[0] = of_nibbles(low_nibbles(both));
        w[1] = of_nibbles(high_nibbles(both));
    }
};

// ---- One tile.

// `count` k of R rows and P panels, added to `sums`.
template <class Codes, int R, int P>
PACE_INLINE void add_steps(const Codes& codes, const typename Codes::Input* x, int64_t x_stride, const uint8_t* w, int64_t panel_bytes,
                           int64_t count, typename Codes::Sum (&sums)[R][P * kVectors]) {
    constexpr int kVectorBytes = 4 * kLanes;
    for (int64_t k = 0; k < count; k += Codes::kStep) {
        typename Codes::Weight weights[P * kVectors][Codes::kFactors];
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) {
            __builtin_prefetch(w + p * panel_bytes + (P == 1 ? kPrefetchBytes : kPrefetchBytes / 2), 0, P == 1 ? 3 : 2);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v)
                Codes::decode(codes, w + p * panel_bytes + v * kVectorBytes, weights[p * kVectors + v]);
        }
#pragma GCC unroll 16
        for (int q = 0; q < Codes::kFactors; ++q)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const auto input = broadcast_input(x + r * x_stride + 4 * q);
#pragma GCC unroll 16
                for (int v = 0; v < P * kVectors; ++v) {
                    sums[r][v] = dot(sums[r][v], weights[v][q], input);
                    keep_order(sums[r][v]);
                }
            }
        x += Codes::kStep;
        w += 64;
    }
}

// The same, added to `dots`, through sums that hold kSumK of k where the codes have such.
template <class Codes, int R, int P>
PACE_INLINE void add_dots(const Codes& codes, const typename Codes::Input* x, int64_t x_stride, const uint8_t* w, int64_t panel_bytes,
                          int64_t count, I32 (&dots)[R][P * kVectors]) {
    if constexpr (std::is_same_v<typename Codes::Sum, I32>) {
        add_steps<Codes, R, P>(codes, x, x_stride, w, panel_bytes, count, dots);
    } else {
        for (int64_t k = 0; k < count; k += Codes::kSumK) {
            typename Codes::Sum sums[R][P * kVectors];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
                for (int v = 0; v < P * kVectors; ++v) sums[r][v] = typename Codes::Sum{};
            add_steps<Codes, R, P>(codes, x + k, x_stride, w + k / Codes::kStep * 64, panel_bytes,
                                   count - k < Codes::kSumK ? count - k : Codes::kSumK, sums);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
                for (int v = 0; v < P * kVectors; ++v) dots[r][v] = add_lanes(dots[r][v], sums[r][v]);
        }
    }
}

// What all tiles of a call share: where things are.
struct QuantizedWeight {
    const PackedHeader& h;
    const int64_t group, input_group, input_groups, panel_bytes, pair_scales_bytes;
    explicit QuantizedWeight(const PackedHeader& h)
        : h(h), group(h.group), input_group(h.input_group()), input_groups(h.input_groups()), panel_bytes(h.panel_bytes()),
          pair_scales_bytes(h.pair_scales_bytes()) {}
};

// One tile: R rows x P panels over the groups of inputs [first, end). Adds to `sums` unless first is 0.
template <class Codes, int R, int P>
static void quantized_tile(const Codes& codes, const QuantizedWeight& w, int64_t panel, const char* x, int64_t x_stride,
                           int64_t first, int64_t end, float* sums, int64_t sums_stride) {
    constexpr int kSums = P * kVectors;
    F32 sum[R][kSums], row_scales[kSums];  // of rows, or powers of two
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kSums; ++v) sum[r][v] = first == 0 ? zero() : load(sums + r * sums_stride + v * kLanes);
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
        if (w.group) {
            load_powers((const int8_t*)w.h.row_scales() + 16 * (panel + p), row_scales + p * kVectors);
        } else {
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v)
                row_scales[p * kVectors + v] = load((const float*)w.h.row_scales() + 16 * (panel + p) + v * kLanes);
        }
    }

    const char* const base = w.h.panel(panel);
    const int64_t codes_of_k = 64 / Codes::kStep;
    const float* const x_scales = QuantizedInput::scales(x, w.h);
    const float* const x_sums = QuantizedInput::sums(x, w.h);
    const int32_t* const starts = QuantizedInput::starts(x, w.h);
    const int64_t stride = x_stride / 4;  // of the three

    // Counted, because a division for each group would take as long as a fifth of its products.
    int64_t k = first * w.input_group, group = w.group ? k / w.group : 0, k_of_next_scale = w.group ? (group + 1) * w.group : w.h.k_padded;
    const char* scales = base + w.h.scales_offset(group);
    const char* codes_at_k = base + w.h.codes_offset(k);
    for (int64_t g = first; g < end; ++g, k += w.input_group) {
        if (k == k_of_next_scale) {
            k_of_next_scale += w.group;
            if (++group % 2) {
                scales += kPanelRows * int64_t(sizeof(F16));
            } else {
                scales = codes_at_k;
                codes_at_k += w.pair_scales_bytes;
                if (P == 1) __builtin_prefetch(scales + kPrefetchBytes);
            }
        }
        const int64_t count = w.h.k_padded - k < w.input_group ? w.h.k_padded - k : w.input_group;
        I32 dots[R][kSums];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const I32 start = broadcast_int(starts[g + r * stride]);
#pragma GCC unroll 16
            for (int v = 0; v < kSums; ++v) dots[r][v] = start;
        }
        using Input = typename Codes::Input;
        add_dots<Codes, R, P>(codes, (const Input*)x + k, x_stride / int64_t(sizeof(Input)), (const uint8_t*)codes_at_k, w.panel_bytes, count,
                              dots);
        codes_at_k += count * codes_of_k;

#pragma GCC unroll 16
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
            for (int i = 0; i < kVectors; ++i) {
                const int v = p * kVectors + i;
                const F16* const place = (const F16*)(scales + p * w.panel_bytes) + i * kLanes;
                const F32 scale = w.group ? load(place) * row_scales[v] : row_scales[v];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
                    sum[r][v] = fused_fma(to_f32(dots[r][v]), scale * broadcast(x_scales[g + r * stride]), sum[r][v]);
                if (w.h.has_mins) {
                    const F32 min = load(place + PackedHeader::kPairScales) * row_scales[v];
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r)
                        sum[r][v] = fused_fma(min * broadcast(x_scales[g + r * stride]), broadcast(x_sums[g + r * stride]),
                                              sum[r][v]);
                }
            }
    }

#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kSums; ++v) store(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

// `rows` rows, at most kQuantizedRows, x `panels` panels.
template <class Codes, int P, int R = 1>
static void quantized_rows(int64_t rows, const Codes& codes, const QuantizedWeight& w, const QuantizedLinearArgs& a, int64_t row,
                           int64_t panel, int64_t panels, int64_t first, int64_t end) {
    if constexpr (R < kQuantizedRows)
        if (rows != R) return quantized_rows<Codes, P, R + 1>(rows, codes, w, a, row, panel, panels, first, end);
    const char* const x = (const char*)a.x + row * a.x_stride;
    float* const sums = a.sums + row * a.sums_stride + panel * 16;
    int64_t p = 0;
    for (; p + P <= panels; p += P)
        quantized_tile<Codes, R, P>(codes, w, a.first_panel + panel + p, x, a.x_stride, first, end, sums + p * 16, a.sums_stride);
    if constexpr (P > 1)
        for (; p < panels; ++p)
            quantized_tile<Codes, R, 1>(codes, w, a.first_panel + panel + p, x, a.x_stride, first, end, sums + p * 16, a.sums_stride);
}

template <class Codes>
static void linear_codes(const QuantizedLinearArgs& a) {
    const Codes codes(*a.weight);
    const QuantizedWeight w(*a.weight);
    // The weights pass by once, and K needs no blocks.
    if (a.rows <= kQuantizedRows)
        return quantized_rows<Codes, 1>(a.rows, codes, w, a, 0, 0, a.panel_count, 0, w.input_groups);

    constexpr int64_t kBlockK = 16 * 1024 / (64 / Codes::kStep * kQuantizedPanels);
    const int64_t groups_per_block = kBlockK / w.input_group;
    const int64_t tiles = divide_up(a.rows, kQuantizedRows);
    for (int64_t panel = 0; panel < a.panel_count; panel += kQuantizedPanels) {
        const int64_t panels = a.panel_count - panel < kQuantizedPanels ? a.panel_count - panel : kQuantizedPanels;
        for (int64_t g = 0; g < w.input_groups; g += groups_per_block) {
            const int64_t end = w.input_groups - g < groups_per_block ? w.input_groups : g + groups_per_block;
            for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
                const int64_t rows = (a.rows - row + tiles - tile - 1) / (tiles - tile);  // nearly equal ones
                quantized_rows<Codes, kQuantizedPanels>(rows, codes, w, a, row, panel, panels, g, end);
                row += rows;
            }
        }
    }
}

static void linear_quantized(const QuantizedLinearArgs& a) {
    if (a.weight->layout == Layout::PanelF8) return linear_float8(a);
#if PACE_ISA_LEVEL >= 5
    if (a.rows > kQuantizedRows) return linear_quantized_amx(a);
#endif
    if (a.weight->layout == Layout::PanelI8) return linear_codes<CodesI8>(a);
    if (a.weight->has_even_levels()) return linear_codes<CodesU4>(a);
    linear_codes<CodesU4Levels>(a);
}
