// Matrix product of quantised activations with weights in super-blocks on AMX tiles, for many rows.
//
// SHAPES, DEFINITION, NUMERICS  As in super_blocks.inl. Totals are integers, so the bits are the same.
//
// LAYOUT      A code times its group's scale, s * level, is at most 4096. It is split as 128 times a high part of -32
//             to 32, plus a low part of -64 to 63. Both have the layout of PanelI8, [k / 4][16][4]. So sums need not
//             end with a group, and a product takes 64 k at a time.
//
// WHY THIS WAY  This takes twice the products of int8: 256 cycles for 128 k of 32 rows x 2 panels. Separate tiles for
//               groups of 16 or 32 k would leave three quarters or half of a tile empty. Vector code would also have to
//               scale the sums of each group. (Counted, not measured.)
#if PACE_ISA_LEVEL >= 5

struct SuperTiles {
    static constexpr int64_t kBytes = 16 * UnpackedSuperBlocks::kMaxK;
    alignas(64) int8_t high[kPanelsOfTiles][kBytes], low[kPanelsOfTiles][kBytes];
};

// Splits `k` unpacked codes of each output.
static void split_codes(const UnpackedSuperBlocks& block, int64_t k, int group, int32_t offset, int8_t* high,
                        int8_t* low) {
    for (int64_t step = 0; step < k / 4; ++step) {
        const int32_t* const scales = block.group_scales[4 * step / group];
        for (int i = 0; i < 64; ++i) {
            const int32_t weight = scales[i / 4] * (int32_t(block.codes[64 * step + i]) - offset);
            const int32_t part = (weight + 64) >> 7;
            high[64 * step + i] = int8_t(part);
            low[64 * step + i] = int8_t(weight - part * 128);
        }
    }
}

// Multiplies `rows` rows x `panels` panels over `halves` times 128 k, from half `first` of the inputs on. Adds to `out`
// unless `first` is 0. Tiles must be configured.
static void super_tiles(const PackedHeader& h, const UnpackedSuperBlocks* blocks, const SuperTiles& tiles,
                        int64_t panels, const char* x, int64_t x_stride, int64_t rows, int64_t first, int64_t halves,
                        float* out, int64_t out_stride) {
    const SuperInputs inputs(h, x, x_stride);
    alignas(64) float high[kRowsOfTiles][kPanelsOfTiles * 16], low[kRowsOfTiles][kPanelsOfTiles * 16];  // integers
    for (int64_t c = 0; c < halves; ++c) {
        const char* const codes_of_x = x + 128 * (first + c);
        const auto multiply_part = [&](const int8_t* part, float* sums) {
            multiply_tiles<int8_t>(rows, panels, codes_of_x, x_stride, (const char*)part + 16 * 128 * c,
                                   SuperTiles::kBytes, 128, 64, sums, sizeof high[0]);
        };
        multiply_part(tiles.high[0], high[0]);
        multiply_part(tiles.low[0], low[0]);
        for (int64_t p = 0; p < panels; ++p) {
            const F32 scales = load(blocks[p].scales[c]), mins = load(blocks[p].mins[c]);
            for (int64_t r = 0; r < rows; ++r) {
                I32 total[1] = {shift_left<7>(bits(load(high[r] + 16 * p))) + bits(load(low[r] + 16 * p))};
                I32 sums[1] = {broadcast_int(0)};
                if (h.has_mins)
                    for (int j = 0; j < 4; ++j)
                        sums[0] = add_pairs(sums[0], load_int(blocks[p].numbers[4 * c + j]),
                                            broadcast_sums(inputs.sums + 8 * (first + c) + r * inputs.sums_stride, j));
                float* const to = out + r * out_stride + 16 * p;
                F32 sum[1] = {first + c == 0 ? zero() : load(to)};
                add_half(total, sums, 0, &scales, h.has_mins ? &mins : nullptr,
                         inputs.scales[first + c + r * inputs.scales_stride], sum);
                store(to, sum[0]);
            }
        }
    }
}

template <class Codes>
static void linear_super_amx(const QuantizedLinearArgs& a) {
    const PackedHeader& h = *a.weight;
    const Codes codes(h);
    UnpackedSuperBlocks blocks[kPanelsOfTiles];
    SuperTiles tiles;
    const int64_t super_blocks = h.k / kSuperBlock;
    for (int64_t panel = 0; panel < a.panel_count; panel += kPanelsOfTiles) {
        const int64_t panels = a.panel_count - panel < kPanelsOfTiles ? a.panel_count - panel : kPanelsOfTiles;
        for (int64_t b = 0; b < super_blocks; b += kSuperBlocksAtOnce) {
            const int64_t end = super_blocks - b < kSuperBlocksAtOnce ? super_blocks : b + kSuperBlocksAtOnce;
            for (int64_t p = 0; p < panels; ++p) {
                unpack_super_blocks(codes, h, a.first_panel + panel + p, b, end, blocks[p]);
                split_codes(blocks[p], (end - b) * kSuperBlock, Codes::kGroup, codes.offset, tiles.high[p],
                            tiles.low[p]);
            }
            for (int64_t row = 0; row < a.rows; row += kRowsOfTiles) {
                const int64_t rows = a.rows - row < kRowsOfTiles ? a.rows - row : kRowsOfTiles;
                configure_tiles(rows, 64);
                super_tiles(h, blocks, tiles, panels, (const char*)a.x + row * a.x_stride, a.x_stride, rows, 2 * b,
                            2 * (end - b), a.sums + row * a.sums_stride + panel * 16, a.sums_stride);
            }
        }
    }
    tile_release();
}

#endif
