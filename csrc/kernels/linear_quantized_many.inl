// Matrix product of quantised activations with weights of int8 or 4-bit codes, for many rows.
//
// SHAPES, DEFINITION, NUMERICS  As in linear_quantized.inl.
//
// LAYOUT      A block has the codes of several input groups of a panel, in the form that the table multiplies. For each
//             group it also has 16 numbers of each kind:
//
//               codes         [k / 4][16][4]     64 bytes a step: 4 k as bytes.
//
//                             [k / 4][2][16][2]  signed ones on avx2, 128 bytes a step: k and k + 2 as 16 bits.
//                                                Then k + 1 and k + 3.
//               scales        in fp32, and minima.
//               own_products  see vec_bytes.inl.
//
// WHY THIS WAY  A block stays in the first-level cache while all rows pass over it. So unpacking costs little, and a
//               tile has all registers for its sums:
//
//     generic  2 rows x 1 panel   16 sums of pairs: some are in memory in any case.
//     avx2     6 rows x 1 panel   nibbles: 12 sums, 2 weights, an input, a product: all 16 registers.
//              4 rows x 1 panel   signed: 8 sums, 4 halves of weights, 2 of an input, 2 sums of those: all 16.
//     avx2_vnni  6 rows x 1 panel  12 sums, 2 weights, an input.
//     avx512   6 rows x 2 panels  12 sums, 12 in fp32, 4 weights, an input: 29 of 32 registers.
//
//             16 KB of codes leave half of a first-level cache of 32 KB to inputs and scales. The inputs of a block
//             stay in the second level for all panels. Signed codes on avx2 are multiplied in pairs: separate products
//             and additions would compete for the ports that products need. Measurements, including failed attempts:
//             benchmarks/RESULTS.md, "Sizes of tiles and blocks".

constexpr int kManyPanels = PACE_ISA_LEVEL <= 1 ? 1 : 2;
constexpr int64_t kUnpackedBlockBytes = 16 * 1024 / kManyPanels;

// True if fp32 sums have registers in addition to the integer sums: on avx512 with dot products. Elsewhere they stay in
// memory, and a group's end adds to them.
constexpr bool kSumsStay = PACE_ISA_LEVEL >= 3;

struct UnpackedBlock {
    static constexpr int64_t kMaxGroups = 32;
    alignas(64) uint8_t codes[kUnpackedBlockBytes];
    float scales[kMaxGroups][16], mins[kMaxGroups][16];
    float own_products[kMaxGroups][16];  // integers
};

// Own products of 16 outputs with unpacked codes at [p, end).
PACE_INLINE void sum_own_products(const uint8_t* p, const uint8_t* end, float* out) {
    I32 sums[kVectors];
    for (I32& sum : sums) sum = broadcast_int(0);
    for (; p < end; p += kUnpackedBytes)
        PACE_EACH(v, kVectors) sums[v] = own_products(sums[v], load_unpacked(p + v * kVectorBytes));
    PACE_EACH(v, kVectors) store(out + v * kLanes, from_bits(sums[v]));
}

// Unpacks groups of inputs [first, end) of a panel.
template <class Codes>
static void unpack_block(const Codes& codes, const QuantizedWeight& w, int64_t panel, int64_t first, int64_t end,
                         UnpackedBlock& block) {
    F32 row_scales[kVectors];
    w.load_row_scales(panel, row_scales);
    uint8_t* out = block.codes;
    for (int64_t g = first; g < end; ++g) {
        const int64_t k = g * w.input_group, count = w.count(g);
        const uint8_t* const p = (const uint8_t*)w.panel(panel) + w.h.codes_offset(k);
        const uint8_t* const begin = out;
        out = unpack_codes(codes, p, count, out);
        if (Codes::Unpacked::kHasOwnProducts) sum_own_products(begin, out, block.own_products[g - first]);
        const F16* const place = w.group ? (const F16*)(w.panel(panel) + w.h.scales_offset(k / w.group)) : nullptr;
        PACE_EACH(v, kVectors) {
            store(block.scales[g - first] + v * kLanes,
                  place ? load(place + v * kLanes) * row_scales[v] : row_scales[v]);
            if (w.h.has_mins)
                store(block.mins[g - first] + v * kLanes,
                      load(place + PackedHeader::kPairScales + v * kLanes) * row_scales[v]);
        }
    }
}

template <int kSums>
PACE_INLINE void load_row(const float* sums, F32 (&row)[kSums]) {
    PACE_EACH(v, kSums) row[v] = load(sums + v * kLanes);
}
template <int kSums>
PACE_INLINE void store_row(float* sums, const F32 (&row)[kSums]) {
    PACE_EACH(v, kSums) store(sums + v * kLanes, row[v]);
}

// One tile: R rows x P panels over the groups of inputs [first, end), which `blocks` contain. Adds to `sums` unless
// first is 0.
template <class Unpacked, int R, int P>
[[gnu::noinline]] static void unpacked_tile(const QuantizedWeight& w, const UnpackedBlock* blocks, const char* x,
                                            int64_t x_stride, int64_t first, int64_t end, float* sums,
                                            int64_t sums_stride) {
    constexpr int kSums = P * kVectors;
    F32 sum[kSumsStay ? R : 1][kSums] = {};
    if (first == 0)
        for (int r = 0; r < R; ++r) store_row(sums + r * sums_stride, sum[0]);
    else if (kSumsStay)
        PACE_EACH(r, R) load_row(sums + r * sums_stride, sum[r]);

    const InputRows<typename Unpacked::Input> inputs(w, x, x_stride);
    const auto* codes_of_x = inputs.codes + first * w.input_group;
    const bool has_mins = w.h.has_mins;
    const uint8_t* codes = blocks->codes;
    for (int64_t g = first; g < end; ++g) {
        const auto of_block = [&](const float (UnpackedBlock::*numbers)[UnpackedBlock::kMaxGroups][16], int v) {
            return load((blocks[v / kVectors].*numbers)[g - first] + v % kVectors * kLanes);
        };
        const auto start = [&](int r, int v) {
            const I32 of_row = broadcast_int(Unpacked::kHasStarts ? inputs.starts[g + r * inputs.stride] : 0);
            return Unpacked::kHasOwnProducts ? of_row - bits(of_block(&UnpackedBlock::own_products, v)) : of_row;
        };
        I32 dots[R][kSums];
        dots_of_group<Unpacked, R, P>(Unpacked(), codes_of_x, inputs.codes_stride, codes, sizeof(UnpackedBlock),
                                      w.count(g), start, dots);

        const auto end_group = [&](auto with_mins) {
            F32 scales[kSums], mins[kSums];
            PACE_EACH(v, kSums) {
                scales[v] = of_block(&UnpackedBlock::scales, v);
                if (with_mins) mins[v] = of_block(&UnpackedBlock::mins, v);
            }
            const auto end_row = [&](int r) {
                F32(&row)[kSums] = sum[kSumsStay ? r : 0];
                if (!kSumsStay) load_row(sums + r * sums_stride, row);
                add_group(dots[r], scales, with_mins ? mins : nullptr, inputs.scales + g + r * inputs.stride,
                          inputs.sums + g + r * inputs.stride, row);
                if (!kSumsStay) store_row(sums + r * sums_stride, row);
            };
            if constexpr (Unpacked::kUnrolledEnd) {
                PACE_EACH(r, R) end_row(r);
            } else {
#pragma GCC unroll 1
                for (int r = 0; r < R; ++r) end_row(r);
            }
        };
        if (has_mins)
            end_group(std::true_type());
        else
            end_group(std::false_type());
    }
    if (kSumsStay)
        PACE_EACH(r, R) store_row(sums + r * sums_stride, sum[r]);
}

// Tiles for `rows` rows, at most Unpacked::kRows, x `panels` panels, at most kManyPanels.
template <class Unpacked, int R = 1>
static void unpacked_rows(int64_t rows, const QuantizedWeight& w, const UnpackedBlock* blocks, int64_t panels,
                          const char* x, int64_t x_stride, int64_t first, int64_t end, float* sums,
                          int64_t sums_stride) {
    if constexpr (R < Unpacked::kRows)
        if (rows != R)
            return unpacked_rows<Unpacked, R + 1>(rows, w, blocks, panels, x, x_stride, first, end, sums, sums_stride);
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
    const int64_t groups = kUnpackedBlockBytes / Unpacked::kStepBytes * Unpacked::kStep / w.input_group;
    const int64_t groups_per_block = groups < UnpackedBlock::kMaxGroups ? groups : UnpackedBlock::kMaxGroups;
    for (int64_t g = 0; g < w.input_groups; g += groups_per_block) {
        const int64_t end = w.input_groups - g < groups_per_block ? w.input_groups : g + groups_per_block;
        for (int64_t panel = 0; panel < a.panel_count; panel += kManyPanels) {
            const int64_t panels = a.panel_count - panel < kManyPanels ? a.panel_count - panel : kManyPanels;
            for (int64_t p = 0; p < panels; ++p) unpack_block(codes, w, a.first_panel + panel + p, g, end, blocks[p]);
            for_tiles(a.rows, Unpacked::kRows, [&](int64_t row, int64_t rows) {
                unpacked_rows<Unpacked>(rows, w, blocks, panels, (const char*)a.x + row * a.x_stride, a.x_stride, g,
                                        end, a.sums + row * a.sums_stride + panel * 16, a.sums_stride);
            });
        }
    }
}
