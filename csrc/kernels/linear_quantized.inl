// Matrix product of quantised activations with weights of codes of 1 to 8 bits, for a range of rows and panels.
//
// SHAPES      x: M rows from quantize_input(): codes xc, and for each group of G inputs a scale xs and the sum of its
//             codes. weights: panels of 16 outputs, PanelI8, PanelU4 or PanelPlanes. sums: [rows][panels * 16] fp32,
//             for linear_epilogue(). G divides the weight's group (128 for row scales). So a group of inputs has one
//             scale ws and, in weights with minima, one minimum wm.
//
// DEFINITION  for m: for n:  sum = 0.
//                 for g ascending:  dot = the sum over k in g of level(W[n][k]) * xc[m][k]          in integers.
//                                   sum = fma(dot, ws[n][g] * xs[m][g], sum).
//                                   sum = fma(wm[n][g] * xs[m][g], sum of xc[m][k] over k in g, sum)       with minima.
//                 sums[m][n] = sum.
//             level(c) = c for int8; levels[c] of the header for 4 bits; c - offset in planes, 2 c - 1 for one bit.
//
//             With token_inputs, the numbers of groups are 1, and sums[m][n] = sum * (ws[n] * xs[m]).
//
// LAYOUT      One step of a panel is 64 bytes, 4 for each output n; it is the same for every table:
//
//               PanelI8   k..k+3    [ n0: k k+1 k+2 k+3 | n1: k k+1 k+2 k+3 | ... | n15 ]
//               PanelU4   k..k+7    the same places; low nibbles are k..k+3, high ones k+4..k+7
//
//             Four k of an output share a 32-bit lane, because the instructions of vec_bytes.inl add them up; their
//             four inputs are one broadcast. The scales and minima of every two groups come before their codes
//             (pace/types.h).
//
// NUMERICS    dot is exact for any codes: |dot| <= 128 * 128 * 127 < 2^24, so its fp32 is exact too. ws is exact (F16
//             times a power of two, or fp32). ws * xs, wm * xs and each fma are rounded once, on level 0 too. So the
//             bits are the same on every table, and for every tile, chunk and thread: row determinism.
//
// WHY THIS WAY  With few rows the product is memory-bound. A tile is all rows x 1 panel, read front to back (see
//               linear.inl), and decoded codes serve all rows. Up to three tiles more find the panel in cache.
//
//     generic  2 rows   16 sums of pairs: some are in memory in any case.
//     avx2     4 rows   int8: 8 sums, 2 weights and their magnitudes, an input, a product, ones: 15 of 16 registers.
//                       Code books: two times the weights, some in memory.
//     avx512   6 rows.
//
//             More rows multiply unpacked codes: linear_quantized_many.inl (amx: linear_quantized_amx.inl). One row is
//             a loop of one line, not unrolled, and on most tables without software prefetch. The hardware prefetcher
//             handles that best (benchmarks/RESULTS.md, "What decode of quantised weights owes its speed to").

constexpr int kCodesRows = PACE_ISA_LEVEL == 0 ? 2 : PACE_ISA_LEVEL == 1 ? 4 : 6;  // rows of a tile
constexpr int kFewRows = PACE_ISA_LEVEL >= 5 ? kCodesRows : 4 * kCodesRows;

// One tile: R rows x one panel.
template <class Codes, int R, bool kHasMins>
[[gnu::noinline]] static void quantized_tile(const Codes& codes_of_weight, const QuantizedWeight& w, int64_t panel,
                                             const char* x, int64_t x_stride, float* sums, int64_t sums_stride) {
    const Codes codes = codes_of_weight;  // keeps them in registers
    const InputRows<typename Codes::Input> inputs(w, x, x_stride);
    F32 sum[R][kVectors] = {}, row_scales[kVectors];
    w.load_row_scales(panel, row_scales);

    const typename Codes::Input* codes_of_x = inputs.codes;
    const uint8_t* p = (const uint8_t*)w.panel(panel);
    const F16* scales_at = nullptr;
    int64_t g = 0, k = 0;
    for (int64_t group = 0; group < w.groups; ++group) {
        F32 scales[kVectors], mins[kVectors];
        if (group % 2) {
            scales_at += kPanelRows;
        } else {
            scales_at = (const F16*)p;
            p += w.pair_scales_bytes;
            if (prefetches<Codes, R>()) __builtin_prefetch((const char*)scales_at + kPrefetchBytes);
        }
        PACE_EACH(v, kVectors) {
            scales[v] = w.group ? load(scales_at + v * kLanes) * row_scales[v] : row_scales[v];
            if (kHasMins) mins[v] = load(scales_at + PackedHeader::kPairScales + v * kLanes) * row_scales[v];
        }
        const int64_t end = w.group && k + w.group < w.k_padded ? k + w.group : w.k_padded;
        for (; k < end; k += w.input_group, ++g) {
            const int64_t count = end - k < w.input_group ? end - k : w.input_group;
            I32 dots[R][kVectors];
            const auto start = [&](int r, int) {
                return broadcast_int(Codes::kHasStarts ? inputs.starts[g + r * inputs.stride] : 0);
            };
            dots_of_group<Codes, R, 1>(codes, codes_of_x, inputs.codes_stride, p, 0, count, start, dots);
            PACE_EACH(r, R)
                add_group(dots[r], scales, kHasMins ? mins : nullptr, inputs.scales + g + r * inputs.stride,
                          inputs.sums + g + r * inputs.stride, sum[r]);
        }
    }

    PACE_EACH(r, R)
        PACE_EACH(v, kVectors) store(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

template <class Codes, bool kHasMins, int R = 1>
static void quantized_rows(int64_t rows, const Codes& codes, const QuantizedWeight& w, int64_t panel, const char* x,
                           int64_t x_stride, float* sums, int64_t sums_stride) {
    if constexpr (R < kCodesRows)
        if (rows != R)
            return quantized_rows<Codes, kHasMins, R + 1>(rows, codes, w, panel, x, x_stride, sums, sums_stride);
    quantized_tile<Codes, R, kHasMins>(codes, w, panel, x, x_stride, sums, sums_stride);
}

template <class Codes, bool kHasMins>
static void linear_few_rows(const QuantizedLinearArgs& a) {
    const Codes codes(*a.weight);
    const QuantizedWeight w(*a.weight);
    for (int64_t panel = 0; panel < a.panel_count; ++panel)
        for_tiles(a.rows, kCodesRows, [&](int64_t row, int64_t rows) {
            quantized_rows<Codes, kHasMins>(rows, codes, w, a.first_panel + panel, (const char*)a.x + row * a.x_stride,
                                            a.x_stride, a.sums + row * a.sums_stride + panel * 16, a.sums_stride);
        });
}

template <class Codes>
static void linear_codes(const QuantizedLinearArgs& a) {
    if (a.rows <= kFewRows)
        return a.weight->has_mins ? linear_few_rows<Codes, true>(a) : linear_few_rows<Codes, false>(a);
#if PACE_ISA_LEVEL >= 5
    linear_quantized_amx(a);
#else
    linear_many_rows<Codes>(a);
#endif
}

static void multiply_codes(const QuantizedLinearArgs& a) {
    if (a.weight->in_super_blocks()) return linear_super(a);
    if (a.weight->layout == Layout::PanelF8) return linear_float8(a);
    if (a.weight->layout == Layout::PanelI8) return linear_codes<CodesI8>(a);
    if (a.weight->layout == Layout::PanelPlanes)
        return a.weight->bits == 1   ? linear_codes<CodesPlanes<1>>(a)
               : a.weight->bits == 2 ? linear_codes<CodesPlanes<2>>(a)
                                     : linear_codes<CodesPlanes<5>>(a);
    if (a.weight->has_even_levels()) return linear_codes<CodesU4>(a);
    if (a.weight->multiplies_distances()) return linear_codes<CodesU4Near>(a);
    linear_codes<CodesU4Levels>(a);
}

// Multiplies the exact sums of a weight with token_inputs by the scales of its rows and of the inputs.
static void scale_by_tokens(const QuantizedLinearArgs& a) {
    const PackedHeader& h = *a.weight;
    const float* const of_rows = (const float*)h.row_scales() + kPanelRows * a.first_panel;
    for (int64_t r = 0; r < a.rows; ++r) {
        const F32 of_token = broadcast(*QuantizedInput::token_scale((const char*)a.x + r * a.x_stride, h));
        float* const sums = a.sums + r * a.sums_stride;
        for (int64_t n = 0; n < a.panel_count * kPanelRows; n += kLanes)
            store(sums + n, load(sums + n) * (load(of_rows + n) * of_token));
    }
}

static void linear_quantized(const QuantizedLinearArgs& a) {
    multiply_codes(a);
    if (a.weight->token_inputs) scale_by_tokens(a);
}
