// Matrix product of activations with packed weights: sums [M, N] = x [M, K] W', for a range of rows and panels.
//
// SHAPES      x: M rows of K, fp32, or bf16 if the table rounds inputs (PanelBF16Pair). W: packed panels of 16 outputs.
//             sums: [rows][panels * 16] fp32, a scratch that linear_epilogue() turns into outputs.
//
// DEFINITION  for m: for n:  sum = 0
//                 for k ascending:  sum = fma(W[n][k], x[m][k], sum)
//                 sums[m][n] = sum
//
// LAYOUT      One panel, [k][16] (drawn for each dtype in pack.inl), is read front to back, once per group of rows:
//
//                         panel p          panel p+1
//                       n 0 ... 15       n 16 ... 31
//               k = 0   [ vectors ]      [ vectors ]      A tile is R rows x P panels. It has R * P * 16
//               k = 1   [    .    ]      [    .    ]      accumulators in registers. Each step loads P
//                ...                                      panels of vectors and broadcasts R inputs.
//
// NUMERICS    One fp32 accumulator per output, k ascending. avx2 and avx512 use fma; generic multiplies and adds. bf16
//             pairs use vdpbf16ps (vec_dot.inl), and amx uses tdpbf16ps on 32 k at a time (tile.inl). Tile shape, K
//             blocks, chunks and threads change no bit: row determinism. (Between K blocks the accumulator is stored in
//             fp32.)
//
// WHY THESE SIZES
//   fp32 FMA has latency 4 and two ports (Zen 2+, Skylake+). 8 vectors of accumulators keep them busy; more make loads
//   rarer. A panel is kVectors = 16 / kLanes vectors. One step of a tile takes `P * kVectors + R` loads for
//   `R * P * kVectors` multiply-adds. The loads (two a cycle) must fit next to the multiply-adds.
//
//     generic  16 registers, 4 vectors a panel:  2 rows x 1 panel   ( 8 sums).
//     avx2     16 registers, 2 vectors a panel:  6 rows x 1 panel   (12 sums, 2 weights, 1 input: 8 loads for 12 FMA).
//     avx512   32 registers, 1 vector  a panel:  6 rows x 4 panels  (24 sums, 4 weights, 1 input: 10 loads for 24 FMA).
//
//   These sizes serve many rows, from weights in cache. If one pass over the weights serves all rows, a tile takes one
//   panel. Memory is then read front to back as one stream, which suits the hardware prefetcher best. The few sums of a
//   one-row tile wait for each other, 4 to 6 cycles for 32 to 64 bytes.
//
//   K blocks keep a tile's weights in a cache while all groups of rows pass over them. A tile of one panel reads 64
//   bytes for 12 multiply-adds. Its block is 16 KB of the first-level cache, half of a small one. A tile of four panels
//   reads 64 for 6, at one or two a cycle. The second-level cache can deliver that, and with 64 KB the sums go to
//   memory and back a quarter as often. Measured: benchmarks/RESULTS.md, "Sizes of tiles and blocks".
//
// SPEED  benchmarks/kernels.py linear compares it with the limits of the machine.

constexpr int kVectors = 16 / kLanes;

// ---- Multiplication by each type of weight

struct WeightF32 {
    using Element = float;
    using Input = float;
    using Vector = F32;
    static constexpr int kStep = 1;  // k in one step
    PACE_INLINE void load_step(const float* p, F32* w) {
        PACE_EACH(v, kVectors) w[v] = load(p + v * kLanes);
    }
    PACE_INLINE F32 broadcast_input(const float* x) { return broadcast(*x); }
    PACE_INLINE F32 multiply_add(F32 w, F32 x, F32 sum) { return fma(w, x, sum); }
};

struct WeightF16 : WeightF32 {
    using Element = F16;
    PACE_INLINE void load_step(const F16* p, F32* w) {
        PACE_EACH(v, kVectors) w[v] = load(p + v * kLanes);
    }
};

#if PACE_ISA_LEVEL <= 1
// PanelBF16Split: a 32-bit lane has output c in its low half and c + 8 in its high half. As fp32, the first is the lane
// shifted left. The second is the lane with its low half cleared.
struct WeightBF16 : WeightF32 {
    using Element = BF16;
    PACE_INLINE void load_step(const BF16* p, F32* w) {
        constexpr int kHalf = kVectors / 2;
        PACE_EACH(v, kHalf) {
            const I32 lanes = bits(load((const float*)p + v * kLanes));
            w[v] = from_bits(shift_left<16>(lanes));
            w[v + kHalf] = from_bits(lanes & broadcast_int((int32_t)0xffff0000));
        }
    }
};
#elif PACE_ISA_LEVEL <= 3
struct WeightBF16 : WeightF32 {
    using Element = BF16;
    PACE_INLINE void load_step(const BF16* p, F32* w) { w[0] = load(p); }
};
#else
struct WeightBF16 {
    using Element = BF16;
    using Input = BF16;
    using Vector = Pairs;
    static constexpr int kStep = 2;
    PACE_INLINE void load_step(const BF16* p, Pairs* w) { w[0] = load_pairs(p); }
    PACE_INLINE Pairs broadcast_input(const BF16* x) { return broadcast_pair(x); }
    PACE_INLINE F32 multiply_add(Pairs w, Pairs x, F32 sum) { return dot_pairs(w, x, sum); }
};
#endif

// Where a tile of several panels prefetches, step by step.
template <class Element>
struct Ahead {
    const Element *one, *other;
};

// What the tiles of a block prefetch: the panels of the next block (null: nothing). They take turns, `turn` of `turns`.
template <class Element>
struct Next {
    const Element* panels;
    int64_t turn, turns;

    // For the tile that reads `own`.
    Ahead<Element> of(const Element* own, int64_t panel_stride, int64_t count) const {
        const auto panel = [&](int64_t p) { return panels && p < count ? panels + p * panel_stride : own; };
        return {panel(turn), panel(turn + turns)};
    }
};

// ---- One tile: R rows x P panels over `steps` steps of k. Adds to `sums` unless `first`.
//
// With many multiply-adds per byte, out-of-order execution sees only a few lines ahead of the weights in memory. So a
// tile prefetches them. A tile of one panel does so 4 KB ahead: Zen 5 needs that, Zen 4 does not mind. Several panels
// are in cache already, so their tile prefetches two panels of the next block, `ahead`. That is measured on Zen 5 only
// (benchmarks/RESULTS.md, "Sizes of tiles and blocks").
//
// Every loop over `sum` is unrolled, else g++ keeps the array in memory.
template <class W, int R, int P>
static void linear_tile(const typename W::Input* x, int64_t x_stride, const typename W::Element* w,
                        int64_t panel_stride, int64_t steps, float* sums, int64_t sums_stride, bool first,
                        const Ahead<typename W::Element>& ahead) {
    F32 sum[R][P * kVectors];
    if (first) {
        PACE_EACH(r, R)
            PACE_EACH(v, P * kVectors) sum[r][v] = zero();
    } else {
        PACE_EACH(r, R)
            PACE_EACH(v, P * kVectors) sum[r][v] = load(sums + r * sums_stride + v * kLanes);
    }

    constexpr int kPrefetchBytes = 4096;
    const typename W::Element *one = ahead.one, *other = ahead.other;
    for (int64_t step = 0; step < steps; ++step) {
        typename W::Vector weights[P * kVectors];
        PACE_EACH(p, P) W::load_step(w + p * panel_stride, weights + p * kVectors);
        if constexpr (P == 1) {
            __builtin_prefetch((const char*)w + kPrefetchBytes, 0, 3);
        } else {
            __builtin_prefetch(one, 0, 2);
            __builtin_prefetch(other, 0, 2);
            one += 16 * W::kStep;
            other += 16 * W::kStep;
        }
        PACE_EACH(r, R) {
            const typename W::Vector input = W::broadcast_input(x + r * x_stride);
            PACE_EACH(v, P * kVectors) sum[r][v] = W::multiply_add(weights[v], input, sum[r][v]);
        }
        x += W::kStep;
        w += 16 * W::kStep;
    }

    PACE_EACH(r, R)
        PACE_EACH(v, P * kVectors) store(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

// ---- A range of rows and panels, cut into tiles.

// Rows of a tile: `kManyRows` for weights in cache; up to `kMaxTileRows` if one pass over the weights serves all rows.
constexpr int kMaxTileRows = PACE_ISA_LEVEL == 0 ? 2 : PACE_ISA_LEVEL == 1 ? 6 : 12;
constexpr int kManyRows = PACE_ISA_LEVEL == 0 ? 2 : 6;

// Panels of a tile with weights in cache, limited by the number of registers; see WHY THESE SIZES.
constexpr int kCachedPanels = PACE_ISA_LEVEL <= 1 ? 1 : 4;

// Bytes of a tile's weights in a block of K; see WHY THESE SIZES.
constexpr int64_t kBlockBytes = (kCachedPanels == 1 ? 16 : 64) * 1024;

// Up to this many rows the product is memory-bound, and panels are read one by one from front to back. With more rows,
// all panels are read for one block of K at a time. The inputs of a block then stay in the second-level cache. Measured
// on avx2: benchmarks/RESULTS.md, "Sizes of tiles and blocks".
constexpr int kStreamedRows = kCachedPanels == 1 ? 16 : 0;

// Calls tile(row, rows) for tiles of nearly equal size: 13 rows are 5 + 4 + 4, not 6 + 6 + 1.
template <class Tile>
PACE_INLINE void for_tiles(int64_t rows, int64_t max_rows, const Tile& tile) {
    for (int64_t row = 0, tiles = divide_up(rows, max_rows); tiles > 0; --tiles) {
        const int64_t count = divide_up(rows - row, tiles);
        tile(row, count);
        row += count;
    }
}

template <class W, int R, int P>
static void linear_rows(const LinearArgs& a, int64_t row, int64_t first_panel, int64_t panels, int64_t k_begin,
                        int64_t k_count, const Next<typename W::Element>& next) {
    using Input = typename W::Input;
    using Element = typename W::Element;
    const Input* x = (const Input*)a.x + row * a.x_stride + k_begin;
    const int64_t panel_stride = 16 * a.k_padded;
    const Element* w = (const Element*)a.panels + first_panel * panel_stride + 16 * k_begin;
    float* sums = a.sums + row * a.sums_stride + first_panel * 16;
    const int64_t steps = k_count / W::kStep;
    int64_t p = 0;
    for (; p + P <= panels; p += P)
        linear_tile<W, R, P>(x, a.x_stride, w + p * panel_stride, panel_stride, steps, sums + p * 16, a.sums_stride,
                             k_begin == 0, next.of(w + p * panel_stride, panel_stride, P));
    if constexpr (P > 1)
        for (; p < panels; ++p)
            linear_tile<W, R, 1>(x, a.x_stride, w + p * panel_stride, panel_stride, steps, sums + p * 16, a.sums_stride,
                                 k_begin == 0, {});
}

// Calls linear_rows with R = rows; rows is in [R, kMaxRows].
template <class W, int P, int kMaxRows, int R = 1>
static void linear_rows_of(int64_t rows, const LinearArgs& a, int64_t row, int64_t first_panel, int64_t panels,
                           int64_t k_begin, int64_t k_count, const Next<typename W::Element>& next = {}) {
    if constexpr (R < kMaxRows)
        if (rows != R)
            return linear_rows_of<W, P, kMaxRows, R + 1>(rows, a, row, first_panel, panels, k_begin, k_count, next);
    linear_rows<W, R, P>(a, row, first_panel, panels, k_begin, k_count, next);
}

template <class W>
static void linear(const LinearArgs& a) {
    // Weights are read only once, so K needs no blocks.
    if (a.rows <= kMaxTileRows)
        return linear_rows_of<W, 1, kMaxTileRows>(a.rows, a, 0, 0, a.panel_count, 0, a.k_padded);

    using Element = typename W::Element;
    constexpr int64_t kBlock = kBlockBytes / (16 * (int64_t)sizeof(Element) * kCachedPanels);
    const auto weights = [&](int64_t panel, int64_t k) {
        return (const Element*)a.panels + 16 * (panel * a.k_padded + k);
    };
    const auto block = [&](int64_t panel, int64_t panels, int64_t k, const Element* next) {
        const int64_t k_count = a.k_padded - k < kBlock ? a.k_padded - k : kBlock;
        Next<Element> ahead = {next, 0, divide_up(a.rows, kManyRows)};
        for_tiles(a.rows, kManyRows, [&](int64_t row, int64_t rows) {
            linear_rows_of<W, kCachedPanels, kManyRows>(rows, a, row, panel, panels, k, k_count, ahead);
            ++ahead.turn;
        });
    };
    if (a.panel_count < kCachedPanels) {  // a tall tile keeps the accumulators busy
        for_tiles(a.rows, kMaxTileRows, [&](int64_t row, int64_t rows) {
            linear_rows_of<W, 1, kMaxTileRows>(rows, a, row, 0, a.panel_count, 0, a.k_padded);
        });
        return;
    }
    if (a.rows <= kStreamedRows) {
        for (int64_t panel = 0; panel < a.panel_count; ++panel) {
            for (int64_t k = 0; k < a.k_padded; k += kBlock) block(panel, 1, k, nullptr);
        }
        return;
    }
    constexpr int64_t kPanelGroup = 4;
    for (int64_t k = 0; k < a.k_padded; k += kBlock) {
        for (int64_t panel = 0; panel < a.panel_count; panel += kPanelGroup) {
            const int64_t panels = a.panel_count - panel < kPanelGroup ? a.panel_count - panel : kPanelGroup;
            const Element* const next = panel + panels < a.panel_count ? weights(panel + panels, k)
                                        : k + kBlock < a.k_padded      ? weights(0, k + kBlock)
                                                                       : (const Element*)a.next_panels;
            block(panel, panels, k, next);
        }
    }
}

#if PACE_ISA_LEVEL >= 5
// ---- AMX: all products use tiles, even for a single row, because a tile adds up 32 k in its own order (tile.inl). A
// step is two tiles of rows x two panels: tmm0-3 sums, 4-5 inputs, 6-7 weights; every loaded tile is used twice.
constexpr int64_t kTileRows = 16, kRowsOfTiles = 2 * kTileRows, kPanelsOfTiles = 2;

// Configures tiles for `rows` rows, at most kRowsOfTiles; a tile takes `row_bytes` of each at a time.
PACE_INLINE void configure_tiles(int64_t rows, int64_t row_bytes) {
    const uint8_t upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper, of_weights = row_bytes / 4;
    const uint8_t tile_rows[8] = {upper, upper, lower, lower, upper, lower, of_weights, of_weights};
    TileConfig config = {};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
        config.rows[t] = tile_rows[t];
        config.row_bytes[t] = tile_rows[t] == 0 ? 0 : t == 4 || t == 5 ? row_bytes : 64;
    }
    tile_configure(config);
}

// Sums, 4 bytes each, of products over `bytes` of each row. `bytes` is a multiple of `row_bytes`; a panel has 16 times
// that.
template <class Element, int kRowTiles, int kPanels>
PACE_INLINE void multiply_tile(const char* x, int64_t x_stride, const char* w, int64_t panel_stride, int64_t bytes,
                               int64_t row_bytes, float* sums, int64_t sums_bytes) {
    tile_zero<0>();
    if constexpr (kPanels > 1) tile_zero<1>();
    if constexpr (kRowTiles > 1) tile_zero<2>();
    if constexpr (kRowTiles > 1 && kPanels > 1) tile_zero<3>();
    for (const char* const end = x + bytes; x < end; x += row_bytes, w += kTileRows * row_bytes) {
        tile_load<4>(x, x_stride);
        tile_load<6>(w, 64);
        tile_dot<Element, 0, 4, 6>();
        if constexpr (kPanels > 1) {
            tile_load<7>(w + panel_stride, 64);
            tile_dot<Element, 1, 4, 7>();
        }
        if constexpr (kRowTiles > 1) {
            tile_load<5>(x + kTileRows * x_stride, x_stride);
            tile_dot<Element, 2, 5, 6>();
            if constexpr (kPanels > 1) tile_dot<Element, 3, 5, 7>();
        }
    }
    tile_store<0>(sums, sums_bytes);
    if constexpr (kPanels > 1) tile_store<1>(sums + 16, sums_bytes);
    if constexpr (kRowTiles > 1) tile_store<2>((char*)sums + kTileRows * sums_bytes, sums_bytes);
    if constexpr (kRowTiles > 1 && kPanels > 1) tile_store<3>((char*)(sums + 16) + kTileRows * sums_bytes, sums_bytes);
}

// Calls multiply_tile for the configured number of rows, and one panel or two. Strides in bytes.
template <class Element>
PACE_INLINE void multiply_tiles(int64_t rows, int64_t panels, const char* x, int64_t x_stride, const char* w,
                                int64_t panel_stride, int64_t bytes, int64_t row_bytes, float* sums,
                                int64_t sums_bytes) {
    const bool lower = rows > kTileRows;
    if (lower && panels > 1)
        multiply_tile<Element, 2, 2>(x, x_stride, w, panel_stride, bytes, row_bytes, sums, sums_bytes);
    else if (lower)
        multiply_tile<Element, 2, 1>(x, x_stride, w, panel_stride, bytes, row_bytes, sums, sums_bytes);
    else if (panels > 1)
        multiply_tile<Element, 1, 2>(x, x_stride, w, panel_stride, bytes, row_bytes, sums, sums_bytes);
    else
        multiply_tile<Element, 1, 1>(x, x_stride, w, panel_stride, bytes, row_bytes, sums, sums_bytes);
}

static void linear_amx(const LinearArgs& a) {
    constexpr int64_t kElement = sizeof(BF16);
    const int64_t panel_stride = 16 * a.k_padded * kElement, x_stride = a.x_stride * kElement;
    const int64_t row_bytes = (a.k_padded < kPairPadding ? a.k_padded : kPairPadding) * kElement;
    for (int64_t row = 0; row < a.rows; row += kRowsOfTiles) {
        const int64_t rows = a.rows - row < kRowsOfTiles ? a.rows - row : kRowsOfTiles;
        configure_tiles(rows, row_bytes);
        for (int64_t p = 0; p < a.panel_count; p += kPanelsOfTiles)
            multiply_tiles<BF16>(rows, a.panel_count - p, (const char*)a.x + row * x_stride, x_stride,
                                 (const char*)a.panels + p * panel_stride, panel_stride, a.k_padded * kElement,
                                 row_bytes, a.sums + row * a.sums_stride + 16 * p, 4 * a.sums_stride);
    }
    tile_release();
}
#endif
