// Matrix product of quantised activations with weights of int8 or 4-bit codes on AMX tiles, for many rows.
//
// SHAPES, DEFINITION, NUMERICS  As in linear_quantized.inl. Sums of products are integers, so the bits are the same.
//
// LAYOUT      A step of PanelI8, 4 k of 16 outputs in 64 bytes, is a row of a tile of weights:
//
//               weights   [k/4][n][4]   16 rows, 64 k         inputs   [m][k]   16 rows of codes from quantize_input()
//
//             Sums end with every group of inputs, so that a tile takes 64 k. Smaller groups take one tile each, with
//             fewer rows.
//
// WHY THIS WAY  Codes become int8, group by group, in a block of 2 panels x 512 k = 16 KB. It stays in the first-level
//               cache while all rows pass over it. A half tile at the end of a row is filled up with zeros; inputs read
//               there have no effect. For 128 k, the products of 32 rows x 2 panels take 8 tdpbssd, 128 cycles.
//               Converting the 64 vectors of sums to fp32 takes about 200 cycles, so that is the bottleneck. vpdpbusd
//               would take 1024 cycles for the same products (two a cycle). Up to kFewRows rows, vpdpbusd multiplies
//               codes as they come from memory, once: linear_quantized.inl. (Counted, not measured.)
#if PACE_ISA_LEVEL >= 5

constexpr int64_t kTilesBlockK = 512;

// Unpacks the codes of a panel's groups of inputs [first, end) to int8 [k/4][16][4], zero-padded to a multiple of
// `tile_k`.
static void decode_for_tiles(const PackedHeader& h, int64_t panel, int64_t first, int64_t end, int64_t tile_k,
                             uint8_t* out) {
    int64_t count = 0;
    for (int64_t g = first; g < end; ++g) {
        const int64_t k = g * h.input_group();
        count = h.k_padded - k < h.input_group() ? h.k_padded - k : h.input_group();
        const uint8_t* const p = (const uint8_t*)h.panel(panel) + h.codes_offset(k);
        uint8_t* const begin = out;
        if (h.layout == Layout::PanelI8) {
            out = unpack_codes(CodesI8(h), p, count, out);
        } else if (h.layout == Layout::PanelPlanes) {
            out = h.bits == 1   ? unpack_codes(CodesPlanes<1>(h), p, count, out)
                  : h.bits == 2 ? unpack_codes(CodesPlanes<2>(h), p, count, out)
                                : unpack_codes(CodesPlanes<5>(h), p, count, out);
            for (uint8_t* code = begin; code < out; ++code) *code = uint8_t(*code - h.offset);
        } else {
            out = unpack_codes(CodesU4Levels(h), p, count, out);
        }
    }
    for (; count % tile_k; count += 4, out += 64) store_bytes(out, Bytes{});
}

// Multiplies `rows` rows x `panels` panels over the groups of inputs [first, end). `codes` [panel][k/4][16][4] are
// their weights. Adds to `sums` unless first is 0. Tiles must be configured.
static void quantized_tiles(const PackedHeader& h, int64_t panel, int64_t panels, const uint8_t* codes, int64_t tile_k,
                            const char* x, int64_t x_stride, int64_t rows, int64_t first, int64_t end, float* sums,
                            int64_t sums_stride) {
    const QuantizedWeight weight(h);  // reads the header once: the compiler would reload it after every tile
    const bool has_mins = h.has_mins;
    F32 row_scales[kPanelsOfTiles];  // row scales, or powers of two
    for (int64_t p = 0; p < panels; ++p) weight.load_row_scales(panel + p, row_scales + p);
    const float* const x_scales = QuantizedInput::scales(x, h);
    const float* const x_sums = QuantizedInput::sums(x, h);
    const int64_t stride = x_stride / 4;  // of x_scales and x_sums

    alignas(64) float dots[kRowsOfTiles][kPanelsOfTiles * 16];  // integers
    for (int64_t g = first; g < end; ++g) {
        const int64_t k = g * weight.input_group, of_block = k - first * weight.input_group;
        multiply_tiles<int8_t>(rows, panels, x + k, x_stride, (const char*)codes + 16 * of_block, 16 * kTilesBlockK,
                               round_up(weight.count(g), tile_k), tile_k, dots[0], sizeof dots[0]);
        const int64_t scales_at = weight.group ? h.scales_offset(k / weight.group) : 0;
        for (int64_t p = 0; p < panels; ++p) {
            const F16* const place = (const F16*)(weight.panel(panel + p) + scales_at);
            const F32 scale = weight.group ? load(place) * row_scales[p] : row_scales[p];
            const F32 min = has_mins ? load(place + PackedHeader::kPairScales) * row_scales[p] : zero();
            for (int64_t r = 0; r < rows; ++r) {
                float* const to = sums + r * sums_stride + 16 * p;
                const I32 dot[1] = {bits(load(dots[r] + 16 * p))};
                F32 sum[1] = {g == 0 ? zero() : load(to)};
                add_group(dot, &scale, has_mins ? &min : nullptr, x_scales + g + r * stride, x_sums + g + r * stride,
                          sum);
                store(to, sum[0]);
            }
        }
    }
}

static void linear_quantized_amx(const QuantizedLinearArgs& a) {
    const PackedHeader& h = *a.weight;
    const int64_t groups = h.input_groups(), groups_per_block = kTilesBlockK / h.input_group();
    const int64_t tile_k = h.input_group() < 64 ? h.input_group() : 64;
    alignas(64) uint8_t codes[kPanelsOfTiles][16 * kTilesBlockK];
    for (int64_t panel = 0; panel < a.panel_count; panel += kPanelsOfTiles) {
        const int64_t panels = a.panel_count - panel < kPanelsOfTiles ? a.panel_count - panel : kPanelsOfTiles;
        for (int64_t g = 0; g < groups; g += groups_per_block) {
            const int64_t end = groups - g < groups_per_block ? groups : g + groups_per_block;
            for (int64_t p = 0; p < panels; ++p)
                decode_for_tiles(h, a.first_panel + panel + p, g, end, tile_k, codes[p]);
            for (int64_t row = 0; row < a.rows; row += kRowsOfTiles) {
                const int64_t rows = a.rows - row < kRowsOfTiles ? a.rows - row : kRowsOfTiles;
                configure_tiles(rows, tile_k);
                quantized_tiles(h, a.first_panel + panel, panels, codes[0], tile_k, (const char*)a.x + row * a.x_stride,
                                a.x_stride, rows, g, end, a.sums + row * a.sums_stride + 16 * panel, a.sums_stride);
            }
        }
    }
    tile_release();
}

#endif
