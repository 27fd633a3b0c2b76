// Matrix product of quantised activations with weights of int8 or 4-bit codes, for many rows.
//
// SHAPES, DEFINITION, NUMERICS  those of linear_quantized.inl.
//
// LAYOUT      A block: the codes of some groups of inputs of a panel as the table multiplies them, and their scales in fp32,
//
//               codes    [k / kStep][16][kStep]   64 bytes a step: 4 k as bytes; on avx2 signed ones 2 k as 16 bits, k and k + 2 in a
//                                                 lane, then k + 1 and k + 3
//               scales   [group][16]              and minima
//
// WHY THIS WAY  A block stays in the first-level cache while all rows pass over it, so that unpacking counts for little, and a tile has
//             registers for its sums alone:
//     generic  2 rows x 1 panel   16 sums of pairs: some are in memory whatever we do
//     avx2     6 rows x 1 panel   (12 sums, 2 weights, an input, a product: all 16 registers)
//     avx512   6 rows x 2 panels  (12 sums, and 12 in fp32, 4 weights, input: 29 of 32 registers)
//             16 KB of codes leave half of a first-level cache of 32 KB to inputs and scales.
//
// SPEED       avx2: a step of signed codes, 12 products and 12 additions, takes 7.3 cycles on Zen 4 in a loop by itself, 1.64 times the peak of fp32. The ports could
//             do it in 6, but additions are given those that products need; additions of fp32 have others and take 6.0, and would add integers up
//             as subnormals; on Skylake, by its ports, it would take half as long again: left alone. A step of nibbles takes as long for twice as many k.

constexpr int kManyPanels = PACE_ISA_LEVEL <= 1 ? 1 : 2;
constexpr int64_t kUnpackedBlockBytes = 16 * 1024 / kManyPanels;

// Sums of integers and of fp32 have registers beside each other on avx512 alone. Elsewhere products have them all to themselves: at a group's end
// both kinds are in memory, and a loop that is not unrolled has g++ do so. (Unrolled: int4 of groups of 32 0.85 times as fast on avx2.)
constexpr int kUnrolledRows = PACE_ISA_LEVEL <= 1 ? 1 : 16;

struct UnpackedBlock {
    static constexpr int64_t kMaxGroups = 32;
    alignas(64) uint8_t codes[kUnpackedBlockBytes];
    float scales[kMaxGroups][16], mins[kMaxGroups][16];
};

// Groups of inputs [first, end) of a panel.
template <class Codes>
static void unpack_block(const Codes& codes, const QuantizedWeight& w, int64_t panel, int64_t first, int64_t end, UnpackedBlock& block) {
    F32 row_scales[kVectors];
    w.load_row_scales(panel, row_scales);
    uint8_t* out = block.codes;
    for (int64_t g = first; g < end; ++g) {
        const int64_t k = g * w.input_group, count = w.count(g);
        const uint8_t* const p = (const uint8_t*)w.h.panel(panel) + w.h.codes_offset(k);
        out = unpack_codes(codes, p, count, out);
        const F16* const place = w.group ? (const F16*)(w.h.panel(panel) + w.h.scales_offset(k / w.group)) : nullptr;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            store(block.scales[g - first] + v * kLanes, place ? load(place + v * kLanes) * row_scales[v] : row_scales[v]);
            if (w.h.has_mins) store(block.mins[g - first] + v * kLanes, load(place + PackedHeader::kPairScales + v * kLanes) * row_scales[v]);
        }
    }
}

// One tile: R rows x P panels over the groups of inputs [first, end), those of `blocks`. Adds to `sums` unless first is 0.
template <class Unpacked, int R, int P>
[[gnu::noinline]] static void unpacked_tile(const QuantizedWeight& w, const UnpackedBlock* blocks, const char* x, int64_t x_stride, int64_t first, int64_t end,
                          float* sums, int64_t sums_stride) {
    constexpr int kSums = P * kVectors;
    F32 sum[R][kSums];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kSums; ++v) sum[r][v] = first == 0 ? zero() : load(sums + r * sums_stride + v * kLanes);

    using Input = typename Unpacked::Input;
    const Input* codes_of_x = (const Input*)x + first * w.input_group;
    const float* const x_scales = QuantizedInput::scales(x, w.h);
    const float* const x_sums = QuantizedInput::sums(x, w.h);
    const int32_t* const starts = QuantizedInput::starts(x, w.h);
    const int64_t stride = x_stride / 4;  // of the three
    const uint8_t* codes = blocks->codes;
    for (int64_t g = first; g < end; ++g) {
        const int64_t count = w.count(g);
        I32 dots[R][kSums];
        dots_of_group<Unpacked, R, P>(Unpacked(), codes_of_x, x_stride / int64_t(sizeof(Input)), codes, sizeof(UnpackedBlock), count,
                                      starts + g, stride, dots);
        F32 scales[kSums], mins[kSums];
#pragma GCC unroll 16
        for (int v = 0; v < kSums; ++v) {
            scales[v] = load(blocks[v / kVectors].scales[g - first] + v % kVectors * kLanes);
            if (w.h.has_mins) mins[v] = load(blocks[v / kVectors].mins[g - first] + v % kVectors * kLanes);
        }
#pragma GCC unroll kUnrolledRows
        for (int r = 0; r < R; ++r)
            add_group(dots[r], scales, w.h.has_mins ? mins : nullptr, x_scales + g + r * stride, x_sums + g + r * stride, sum[r]);
        codes_of_x += count;
        codes += count / Unpacked::kStep * 64;
    }

#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kSums; ++v) store(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

// `rows` rows, at most kManyRows, x `panels` panels, at most kManyPanels.
template <class Unpacked, int R = 1>
static void unpacked_rows(int64_t rows, const QuantizedWeight& w, const UnpackedBlock* blocks, int64_t panels, const char* x,
                          int64_t x_stride, int64_t first, int64_t end, float* sums, int64_t sums_stride) {
    if constexpr (R < kManyRows)
        if (rows != R) return unpacked_rows<Unpacked, R + 1>(rows, w, blocks, panels, x, x_stride, first, end, sums, sums_stride);
    if (panels == kManyPanels)
        unpacked_tile<Unpacked, R, kManyPanels>(w, blocks, x, x_stride, first, end, sums, sums_stride);
    else
        unpacked_tile<Unpacked, R, 1>(w, blocks, x, x_stride, first, end, sums, sums_stride);
}

template <class Codes>
static void linear_many_rows(const QuantizedLinearArgs& a) {
    using Unpacked = typename Codes::Unpacked;
    const Codes codes(*a.weight);
    const QuantizedWeight w(*a.weight);
    UnpackedBlock blocks[kManyPanels];
    const int64_t groups = kUnpackedBlockBytes / 64 * Unpacked::kStep / w.input_group, tiles = divide_up(a.rows, kManyRows);
    const int64_t groups_per_block = groups < UnpackedBlock::kMaxGroups ? groups : UnpackedBlock::kMaxGroups;
    for (int64_t panel = 0; panel < a.panel_count; panel += kManyPanels) {
        const int64_t panels = a.panel_count - panel < kManyPanels ? a.panel_count - panel : kManyPanels;
        for (int64_t g = 0; g < w.input_groups; g += groups_per_block) {
            const int64_t end = w.input_groups - g < groups_per_block ? w.input_groups : g + groups_per_block;
            for (int64_t p = 0; p < panels; ++p) unpack_block(codes, w, a.first_panel + panel + p, g, end, blocks[p]);
            for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
                const int64_t rows = (a.rows - row + tiles - tile - 1) / (tiles - tile);  // nearly equal ones
                unpacked_rows<Unpacked>(rows, w, blocks, panels, (const char*)a.x + row * a.x_stride, a.x_stride, g, end,
                                        a.sums + row * a.sums_stride + panel * 16, a.sums_stride);
                row += rows;
            }
        }
    }
}
