// Matrix product of quantised activations with weights in super-blocks, for a range of rows and panels.
//
// SHAPES, DEFINITION, NUMERICS  As in super_blocks.inl.
//
// WHY THIS WAY  With few rows the product is memory-bound. A tile is up to kSuperRows rows x 1 panel, read front to
//               back, and codes are decoded in registers. They are prefetched even for one row, because a line takes
//               more instructions than in int8. Two tiles find the panel in cache. More rows multiply codes that were
//               unpacked once: linear_super_many.inl (amx: linear_super_amx.inl).

constexpr int kSuperRows = PACE_ISA_LEVEL == 0 ? 2 : 4;  // rows of a tile
constexpr int kFewSuperRows = 2 * kSuperRows;

// Adds products of the 32 k of unit `unit`, with codes at p.
template <class Codes, int R>
PACE_INLINE void add_unit(const Codes& codes, const uint8_t* p, const int8_t* group_scales, const InputCode* x,
                          int64_t x_stride, I32 (&total)[R][kVectors]) {
    using Sum = typename Codes::Sum;
    unrolled<8 / Codes::kSumSteps>([&](auto part) __attribute__((always_inline)) {
        constexpr int kFirst = part * Codes::kSumSteps, kGroup = kFirst / Codes::kGroupSteps;
        Sum sums[R][kVectors];
        PACE_EACH(r, R)
            PACE_EACH(v, kVectors) sums[r][v] = Sum{};
        unrolled<Codes::kSumSteps>([&](auto step) __attribute__((always_inline)) {
            constexpr int s = kFirst + step;
            typename Codes::Weight weights[kVectors];
            PACE_EACH(v, kVectors) weights[v] = Codes::template step<s>(codes, p + v * kVectorBytes);
            PACE_EACH(r, R) {
                const auto input = broadcast_input(x + r * x_stride + 4 * s);
                PACE_EACH(v, kVectors) sums[r][v] = dot(sums[r][v], weights[v], input);
            }
        });
        PACE_EACH(v, kVectors) {
            const I32 scale = scale_of<Sum>(load_int(group_scales + kGroup * 16 + v * kLanes));
            PACE_EACH(r, R) total[r][v] = add_scaled(total[r][v], sums[r][v], scale);
        }
    });
}

// One tile: R rows x one panel.
template <class Codes, int R>
[[gnu::noinline]] static void super_tile(const Codes& codes_of_weight, const SuperWeight& weight, int64_t panel,
                                         const char* x, int64_t x_stride, float* out, int64_t out_stride) {
    constexpr int kUnitBytes = Codes::kUnitBytes, kUnitsOfHalf = 4;
    const Codes codes = codes_of_weight;  // keeps them in registers
    const SuperWeight w = weight;
    const SuperInputs inputs(w.h, x, x_stride);
    const uint8_t* p = w.panel(panel);
    const bool has_mins = w.has_mins, has_offset = codes.offset != 0;
    F32 sum[R][kVectors] = {};
    for (int64_t b = 0; b < w.super_blocks; ++b, p += w.block_bytes) {
        const SuperHead<Codes> head(w, p);
        const uint8_t* unit = head.codes;
        for (int half = 0; half < 2; ++half) {
            const int64_t c = 2 * b + half;
            const int first_group = half * Codes::kGroups / 2;
            I32 total[R][kVectors];
            PACE_EACH(r, R)
                PACE_EACH(v, kVectors) total[r][v] = broadcast_int(0);
#pragma GCC unroll 1
            for (int u = 0; u < kUnitsOfHalf; ++u, unit += kUnitBytes) {
                if constexpr (Codes::kStreams)
                    PACE_EACH(line, kUnitBytes / 64) __builtin_prefetch(unit + 64 * line + kPrefetchBytes);
                add_unit<Codes, R>(codes, unit, head.group_scales + (first_group + u * (32 / Codes::kGroup)) * 16,
                                   inputs.codes + 128 * c + 32 * u, inputs.codes_stride, total);
            }
            const int8_t* const numbers = (has_mins ? head.group_mins : head.group_scales) + first_group * 16;
            I32 numbers_of[kUnitsOfHalf][kVectors];
            if (has_mins || has_offset)
                PACE_EACH(j, kUnitsOfHalf)
                    PACE_EACH(v, kVectors) numbers_of[j][v] = numbers_of_sums<Codes>(numbers, j, v);
            PACE_EACH(r, R) {
                I32 sums[kVectors];
                PACE_EACH(v, kVectors) sums[v] = broadcast_int(0);
                if (has_mins || has_offset)
                    PACE_EACH(j, kUnitsOfHalf) {
                        const I32 of_inputs = broadcast_sums(inputs.sums + 8 * c + r * inputs.sums_stride, j);
                        PACE_EACH(v, kVectors) sums[v] = add_pairs(sums[v], numbers_of[j][v], of_inputs);
                    }
                add_half(total[r], sums, codes.offset, head.scales, has_mins ? head.mins : nullptr,
                         inputs.scales[c + r * inputs.scales_stride], sum[r]);
            }
        }
    }
    PACE_EACH(r, R)
        PACE_EACH(v, kVectors) store(out + r * out_stride + v * kLanes, sum[r][v]);
}

template <class Codes, int R = 1>
static void super_rows(int64_t rows, const Codes& codes, const SuperWeight& w, int64_t panel, const char* x,
                       int64_t x_stride, float* out, int64_t out_stride) {
    if constexpr (R < kSuperRows)
        if (rows != R) return super_rows<Codes, R + 1>(rows, codes, w, panel, x, x_stride, out, out_stride);
    super_tile<Codes, R>(codes, w, panel, x, x_stride, out, out_stride);
}

template <class Codes>
static void linear_super_codes(const QuantizedLinearArgs& a) {
#if PACE_ISA_LEVEL >= 5
    if (a.rows > kFewSuperRows) return linear_super_amx<Codes>(a);
#else
    if (a.rows > kFewSuperRows) return linear_super_many<Codes>(a);
#endif
    const Codes codes(*a.weight);
    const SuperWeight w(*a.weight);
    for (int64_t panel = 0; panel < a.panel_count; ++panel)
        for_tiles(a.rows, kSuperRows, [&](int64_t row, int64_t rows) {
            super_rows(rows, codes, w, a.first_panel + panel, (const char*)a.x + row * a.x_stride, a.x_stride,
                       a.sums + row * a.sums_stride + panel * 16, a.sums_stride);
        });
}

static void linear_grid(const QuantizedLinearArgs& a) {
    const GridType type = grid_type(a.weight->grid());
    if (type.digit_bits == 3) return linear_super_codes<GridCodes<3, 32>>(a);
    type.group == 32 ? linear_super_codes<GridCodes<2, 32>>(a) : linear_super_codes<GridCodes<2, 16>>(a);
}

static void linear_super(const QuantizedLinearArgs& a) {
    if (a.weight->layout == Layout::PanelGrid) return linear_grid(a);
    switch (a.weight->bits) {
        case 2:
            return linear_super_codes<SuperCodes<2>>(a);
        case 3:
            return linear_super_codes<SuperCodes<3>>(a);
        case 4:
            return a.weight->has_even_levels() ? linear_super_codes<SuperCodes<4>>(a)
                                               : linear_super_codes<SuperCodes<4, true>>(a);
        case 5:
            return linear_super_codes<SuperCodes<5>>(a);
        default:
            return linear_super_codes<SuperCodes<6>>(a);
    }
}
